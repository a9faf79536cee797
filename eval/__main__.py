"""python -m eval run --model DIR --tasks NAME[,NAME]; also compare A B, harness TASK, conformance
FILE.json, list.

Under torchrun, e.g. `torchrun --standalone --nproc-per-node 4 -m eval run ... --ep 2`, ranks share
the work.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from eval.start import answer_interrupts

    answer_interrupts()

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any, get_args

from transformers.utils import logging

from eval.answers.likelihood import Normalization, Scoring
from eval.answers.predict import MODES
from eval.commands.compare import add_compare_command, run_compare
from eval.commands.conformance import add_conformance_command, run_conformance
from eval.commands.harness import add_harness_command, run_harness
from eval.commands.tasks import tasks_table
from eval.names import split_names
from eval.records import AverageScore, MetricScore, Report
from eval.reports.formatting import format_interval, format_score
from eval.reports.report_text import earlier_report_sentence
from eval.run import evaluate
from eval.task import SPLITS
from moe import ConfigError, launch, run_main
from moe.cli import Parser, integer, path, real, word
from moe.files import output_path

MOST_SECONDS = 30 * 24 * 3600
"""That ranks wait for others; what waits for a month is lost."""


def main(argv: list[str]) -> None:
    """Runs a sub-command."""
    parser = Parser(
        prog="python -m eval", description="Evaluates sequence-to-sequence checkpoints."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="lists the tasks")
    add_run_command(commands)
    add_compare_command(commands)
    add_harness_command(commands)
    add_conformance_command(commands)
    arguments = parser.parse_args(argv)
    if arguments.command == "list":
        print(tasks_table())
    elif arguments.command == "run":
        run_evaluation(arguments, argv)
    elif arguments.command == "compare":
        run_compare(arguments)
    elif arguments.command == "harness":
        run_harness(arguments)
    elif arguments.command == "conformance":
        run_conformance(arguments)


def add_run_command(commands: Any) -> None:
    """Adds `run` to the sub-commands."""
    run: argparse.ArgumentParser = commands.add_parser("run", help="evaluates models on tasks")
    run.add_argument(
        "--model", required=True, help="checkpoint folder, or NAME=FOLDER to name it in the report"
    )
    run.add_argument(
        "--also", action="append", default=[], help="a further NAME=FOLDER to stand beside it"
    )
    run.add_argument("--tasks", required=True, help="names, separated by commas")
    run.add_argument(
        "--modes", help=f"of {', '.join(MODES)} (default: all that a task can be answered in)"
    )
    run.add_argument("--split", choices=SPLITS, help="default: each task's own")
    run.add_argument("--limit", type=integer(least=1), help="most examples of a task")
    run.add_argument(
        "--data",
        type=path,
        help="folder with a folder TASK of .jsonl or .parquet instead of the hub",
    )
    run.add_argument(
        "--revision",
        type=word,
        help="branch or commit of the data on the hub (default: each task's own)",
    )
    run.add_argument("--no-eos", action="store_true", help="rank choices without the end token")
    run.add_argument(
        "--normalize",
        choices=get_args(Normalization),
        default="none",
        help="length that a choice's score is divided by (default: none)",
    )
    run.add_argument(
        "--out", default="runs/eval", help="folder of the reports (default: runs/eval)"
    )
    axis = integer(least=1)
    run.add_argument(
        "--ep",
        type=axis,
        default=1,
        help="ranks that the experts of a layer are spread over (default: 1)",
    )
    run.add_argument(
        "--tp", type=axis, default=1, help="ranks that heads and d_ff are spread over (default: 1)"
    )
    seconds = real(above=0, most=MOST_SECONDS)
    run.add_argument(
        "--timeout",
        type=seconds,
        default=600.0,
        help="seconds that ranks wait for others (default: 600)",
    )


def run_evaluation(arguments: argparse.Namespace, argv: list[str]) -> None:
    """Evaluates, prints the scores and says where the reports are; exits with 1 when a task failed."""
    models = parse_models([arguments.model, *arguments.also])
    out = output_path(arguments.out, inputs=[arguments.data, *models.values()])
    logging.disable_progress_bar()
    with launch(arguments.timeout) as world:
        starter = (
            ["python"] if world.size == 1 else ["torchrun", "--nproc-per-node", str(world.size)]
        )
        report = evaluate(
            models,
            split_names("--tasks", arguments.tasks),
            modes=None if arguments.modes is None else split_names("--modes", arguments.modes),
            split=arguments.split,
            limit=arguments.limit,
            data=arguments.data,
            revision=arguments.revision,
            scoring=Scoring(include_eos=not arguments.no_eos, normalize=arguments.normalize),
            out=out,
            command=shlex.join([*starter, "-m", "eval", *argv]),
            world=world,
            ep=arguments.ep,
            tp=arguments.tp,
        )
    if report is None:  # rank 0 speaks
        return
    print_scores(report)
    print(
        f"The reports are {', '.join(str(out / f'report.{kind}') for kind in ('html', 'md', 'json'))}."
    )
    if report.earlier:
        print(earlier_report_sentence(str(out / report.earlier)))
    for failure in report.failed:
        print(f"error: {failure.task} failed: {failure.message}", file=sys.stderr)
    if report.failed:
        sys.exit(1)


def print_scores(report: Report) -> None:
    """Prints a line for each task, system and metric."""
    for task in report.tasks:
        for system in task.systems:
            for score in system.scores:
                _print_score(task.task, system.name, system.mode, score.metric, score)
    for average in report.averages:
        _print_score("SuperGLUE", average.name, average.mode, "average", average)


def _print_score(
    task: str, name: str, mode: str, metric: str, score: MetricScore | AverageScore
) -> None:
    value = format_score(score.value)
    spread = format_interval(score.low, score.high)
    print(f"{task}  {name:<20} {mode:<9} {metric:<12} {value:>5}  ({spread})")


def parse_models(values: list[str]) -> dict[str, Path]:
    """Returns folders by name of `FOLDER` or `NAME=FOLDER`; without a name it is called model.

    A name is part of the names of files: what is a folder, or has a slash before the first `=`, has
    none.

    Raises:
        ConfigError: When two have one name, or one an empty one.
    """
    models: dict[str, Path] = {}
    for value in values:
        name, separator, folder = value.partition("=")
        if not separator or "/" in name or Path(value).is_dir():
            name, folder = "model", value
        if not name or not folder.strip():
            raise ConfigError(f"{value!r} names no model. Give FOLDER or NAME=FOLDER.")
        if name in models:
            raise ConfigError(f"Two models are called {name!r}. Give them names: NAME=FOLDER.")
        models[name] = Path(folder)
    return models


def how_to_go_on(argv: list[str]) -> str:
    """Returns what the user is told after Ctrl-C or where the disk is full."""
    if argv[:1] == ["run"]:
        return "The same command goes on: answers that it wrote are kept."
    return "Run the same command again: it begins anew."


if __name__ == "__main__":
    run_main(main, interrupted=how_to_go_on(sys.argv[1:]))
