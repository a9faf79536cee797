"""stmoe eval run: evaluates models on tasks and writes the reports."""

import shlex
import sys
from pathlib import Path
from typing import get_args

from transformers.utils import logging

from moe.cli import Parser, integer, path, real, word
from moe.data.pair_files import COLUMNS
from moe.data.rows import parse_columns
from moe.distributed.launch import World, launch
from moe.errors import ConfigError
from moe.files import find_model, output_path
from moe.inspection.formatting import format_score
from stmoe_eval.answers.likelihood import Normalization, Scoring
from stmoe_eval.answers.predict import MODES
from stmoe_eval.baselines.data import BaselineSettings
from stmoe_eval.commands.command import add_inference_options, inference_of, name_list
from stmoe_eval.pairs import read_pairs_task
from stmoe_eval.reports.formatting import NOTED, format_marked_interval
from stmoe_eval.reports.records import AverageScore, MetricScore, Report, SystemResult, TaskResult
from stmoe_eval.reports.report_text import contamination_sentence, cost_rows, signature_sentences
from stmoe_eval.reports.scoreboard import NOT_SCORED
from stmoe_eval.run import evaluate
from stmoe_eval.task import SPLITS

_MAX_SECONDS = 30 * 24 * 3600
"""Longest time that ranks wait for others; what waits for a month is lost."""

_REPORTS = ("report.html", "report.md", "report.json")


def build_parser() -> Parser:
    """Returns the parser of the options."""
    parser = Parser(
        prog="stmoe eval run", description="Evaluates models on tasks, or on your own pairs."
    )

    # Models and pairs to evaluate.
    parser.add_argument(
        "--model", required=True, help="checkpoint folder, or NAME=FOLDER to name it in the report"
    )
    parser.add_argument(
        "--also", action="append", default=[], help="a further NAME=FOLDER to stand beside it"
    )
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--tasks", type=name_list, help="names, separated by commas")
    data.add_argument(
        "--pairs", type=path, metavar="FILE", help="table of your own pairs, instead of tasks"
    )
    parser.add_argument(
        "--train-pairs",
        type=path,
        metavar="FILE",
        help="table of pairs that the baselines of --pairs are fitted to, without those evaluated",
    )
    parser.add_argument(
        "--columns",
        nargs="+",
        default=[],
        help="columns of these tables, e.g. inputs=question targets=answer",
    )
    parser.add_argument(
        "--modes",
        type=name_list,
        help=f"of {', '.join(MODES)} (default: all that a task can be answered in)",
    )

    # On which examples.
    parser.add_argument("--split", choices=SPLITS, help="default: each task's own")
    parser.add_argument("--limit", type=integer(least=1), help="most examples of a task")
    parser.add_argument(
        "--data",
        type=path,
        help="folder with a folder TASK of .jsonl or .parquet instead of the hub",
    )
    parser.add_argument(
        "--revision",
        type=word,
        help="branch or commit of the data on the hub (default: each task's own)",
    )
    parser.add_argument(
        "--contamination",
        type=path,
        metavar="CORPUS",
        help="corpus in which the examples are looked for; scores without those it has stand beside",
    )

    # Data for the baselines of classification and summarization.
    parser.add_argument(
        "--train-examples",
        type=integer(least=1),
        help="most training examples of the baselines, as mixture.train_examples (default: all)",
    )
    parser.add_argument(
        "--train-seed",
        type=integer(least=0, most=2**32 - 1),
        default=0,
        help="seed of their choice, the fine-tuning's (default: 0)",
    )

    # How choices are scored.
    parser.add_argument("--no-eos", action="store_true", help="rank choices without the end token")
    parser.add_argument(
        "--normalize",
        choices=get_args(Normalization),
        default="none",
        help="length that a choice's score is divided by (default: none)",
    )

    # How the models compute.
    add_inference_options(parser)

    # Folder of the reports, and the ranks that write them.
    parser.add_argument(
        "--out", default="runs/eval", help="folder of the reports (default: runs/eval)"
    )
    parser.add_argument(
        "--ep",
        type=integer(least=1),
        default=1,
        help="ranks that the experts of a layer are sharded over (default: 1)",
    )
    parser.add_argument(
        "--tp",
        type=integer(least=1),
        default=1,
        help="ranks that heads and d_ff are sharded over (default: 1)",
    )
    parser.add_argument(
        "--timeout",
        type=real(above=0, most=_MAX_SECONDS),
        default=600.0,
        help="seconds that ranks wait for others (default: 600)",
    )
    return parser


def main(argv: list[str]) -> None:
    """Evaluates, prints the scores and where the reports are; exits with 1 when a task failed."""
    arguments = build_parser().parse_args(argv)
    models = parse_models([arguments.model, *arguments.also])
    files = [arguments.data, arguments.pairs, arguments.train_pairs]
    inputs = [*files, arguments.contamination, *models.values()]
    out = output_path(arguments.out, inputs=inputs)
    logging.disable_progress_bar()
    tasks = arguments.tasks
    if arguments.pairs is not None:
        columns = parse_columns(arguments.columns, COLUMNS)
        tasks = [read_pairs_task(arguments.pairs, arguments.train_pairs, columns)]

    with launch(arguments.timeout) as world:
        report = evaluate(
            models,
            tasks,
            modes=arguments.modes,
            split=arguments.split,
            limit=arguments.limit,
            data=arguments.data,
            revision=arguments.revision,
            scoring=Scoring(include_eos=not arguments.no_eos, normalize=arguments.normalize),
            baselines=BaselineSettings(
                train_examples=arguments.train_examples, train_seed=arguments.train_seed
            ),
            contamination=arguments.contamination,
            out=out,
            command=_command_line(argv, world),
            world=world,
            ep=arguments.ep,
            tp=arguments.tp,
            inference=inference_of(arguments),
        )
    if report is None:  # rank 0 prints
        return

    # Scores, the paths of the reports, and failures.
    print_scores(report)
    _print_costs(report)
    print(f"The reports are {', '.join(str(out / name) for name in _REPORTS)}.")
    for failure in report.failed:
        print(f"error: {failure.task} failed: {failure.message}", file=sys.stderr)
    if report.failed:
        sys.exit(1)


def parse_models(values: list[str]) -> dict[str, Path]:
    """Returns the folders by name, read from `FOLDER` or `NAME=FOLDER`; the default name is `model`.

    A name is part of the names of files. A folder, or a text with a slash before the first `=`, has
    no name.

    Raises:
        ConfigError: When two have the same name, or a name is empty.
    """
    models: dict[str, Path] = {}
    for value in values:
        name, separator, folder = value.partition("=")
        if not separator or "/" in name or Path(value).is_dir():
            name = "model"
            folder = value

        # Two models with the same name would write to the same file.
        if not name or not folder.strip():
            raise ConfigError(f"{value!r} names no model. Give FOLDER or NAME=FOLDER.")
        if name in models:
            raise ConfigError(f"Two models have the name {name!r}. Give them names: NAME=FOLDER.")
        models[name] = find_model(Path(folder))
    return models


def print_scores(report: Report) -> None:
    """Prints a line for each task, system and metric, the averages, and the notes on them."""
    rows: list[list[str]] = []
    scored_by_note: dict[str, list[str]] = {}
    for task in report.tasks:
        for system in task.systems:
            for score in system.scores:
                names = [task.task, system.name, system.mode, score.metric]
                rows.append([*names, *_value_and_interval(score)])
                if score.note:
                    scored_by_note.setdefault(score.note, []).append(f"{task.task} {score.metric}")
            if task.num_hidden:
                _print_unscored(task, system)
        if task.contamination:
            print(f"{task.task}  {contamination_sentence(task.contamination)}")
            for clean in task.contamination.clean_scores:
                for score in clean.scores:
                    names = [task.task, f"{clean.name}, clean", clean.mode, score.metric]
                    rows.append([*names, *_value_and_interval(score)])
    for average in report.averages:
        names = ["SuperGLUE", average.name, average.mode, "average"]
        rows.append([*names, *_value_and_interval(average)])
        if average.note:
            scored_by_note.setdefault(average.note, []).append("SuperGLUE average")

    # Columns as wide as their widest cell; numbers are right-aligned.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *names, value, interval in rows:
        cells = [name.ljust(width) for name, width in zip(names, widths, strict=False)]
        print("  ".join([*cells, value.rjust(widths[-2]), interval]))

    # Settings of metrics, and the meaning of the marks: each note once.
    for task in report.tasks:
        for signature in signature_sentences(task):
            print(f"{task.task}, {signature}")
    for note, scored in scored_by_note.items():
        print(f"{NOTED} {', '.join(dict.fromkeys(scored))}: {note}.")


def _print_costs(report: Report) -> None:
    """Prints the cost of an example, and the speed of the models."""
    for task in report.tasks:
        for name, mode, _, _, flops, speed in cost_rows(report, task):
            print(
                f"cost of {task.task} by {name}, {mode}: {flops} FLOPs per example, {speed} tokens/s"
            )


def _value_and_interval(score: MetricScore | AverageScore) -> tuple[str, str]:
    return format_score(score.value), f"({format_marked_interval(score)})"


def _print_unscored(task: TaskResult, system: SystemResult) -> None:
    """Prints that labels are hidden, and the file for the benchmark's site."""
    text = f"{task.task}  {system.name:<20} {system.mode:<9} {NOT_SCORED}: labels are hidden"
    if system.submission is not None:
        text += f"; see {system.submission.file}"
    print(text)


def _command_line(argv: list[str], world: World) -> str:
    """Returns the command in a form that can be typed again."""
    starter = ["stmoe"]
    if world.size > 1:
        starter = ["torchrun", "--nproc-per-node", str(world.size), "-m", "stmoe"]
    return shlex.join([*starter, "eval", "run", *argv])
