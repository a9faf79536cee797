"""stmoe eval compare A B: two runs on the same examples, without any model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe.cli import Parser
from moe.errors import ConfigError, DataError, did_you_mean
from moe.files import check_kind, claim_folder, output_path, write_text
from moe.inspection.formatting import format_score
from moe.parsing import printable, to_json
from stmoe_eval.answers.predict import MODES
from stmoe_eval.commands.command import name_list
from stmoe_eval.pairs import find_task
from stmoe_eval.reports.formatting import NOTED, markdown_table, shorten
from stmoe_eval.reports.records import (
    ComparedModel,
    Comparison,
    ExampleDifference,
    Report,
    TaskComparison,
    TaskResult,
)
from stmoe_eval.reports.run_folder import read_answers, read_report
from stmoe_eval.scores.intervals import score_answers, task_seed
from stmoe_eval.scores.pairing import MetricComparison, compare_answers
from stmoe_eval.task import Task

_SHOWN_EXAMPLES = 10
_SHOWN_CHARACTERS = 300
_WRITTEN_CHARACTERS = 500
_METRIC_HEADER = ["metric", "A", "B", "A - B", "95 % interval", "p", "wins", "losses", "ties"]
_EXAMPLE_HEADER = ["id", "inputs", "target", "A", "B", "score A", "score B"]


class Side(NamedTuple):
    """One side of a comparison: a model of a run.

    Attributes:
        name: Name of the model in the run.
        folder: Folder of the run.
        report: Its report.
        tasks: Tasks of the report by name.
    """

    name: str
    folder: Path
    report: Report
    tasks: dict[str, TaskResult]

    def modes(self, task: str) -> list[str]:
        """Returns the modes in which the model answered a task; empty for none."""
        systems = self.tasks[task].systems if task in self.tasks else []
        return [one.mode for one in systems if one.name == self.name and one.mode in MODES]


def build_parser() -> Parser:
    """Returns the parser of the options."""
    parser = Parser(
        prog="stmoe eval compare",
        description="Paired permutation test of each task and metric, and the examples where two runs differ.",
    )
    side = "folder of a run; NAME=FOLDER for another than its first model"
    parser.add_argument("a", metavar="A", help=side)
    parser.add_argument("b", metavar="B", help=side)
    parser.add_argument(
        "--tasks", type=name_list, help="names, separated by commas (default: all that both have)"
    )
    parser.add_argument("--mode", choices=MODES, help="default: all that both have")
    parser.add_argument(
        "--out", default="runs/compare", help="folder of the reports (default: runs/compare)"
    )
    return parser


def main(argv: list[str]) -> None:
    """Compares two runs, writes compare.json and compare.md, and prints a line for each metric."""
    arguments = build_parser().parse_args(argv)
    out = output_path(arguments.out)
    check_kind(out, "comparison")
    comparison = compare_runs(arguments.a, arguments.b, tasks=arguments.tasks, mode=arguments.mode)

    content = json.dumps(to_json(comparison), indent=1, ensure_ascii=False)
    text = printable(comparison_markdown(comparison))
    in_use = f"Another comparison writes to {out}. Wait for it, or give another --out."
    with claim_folder(out, "comparison", in_use=in_use):
        write_text(out / "compare.json", content + "\n")
        write_text(out / "compare.md", text)
    print(*comparison_lines(comparison), sep="\n")
    print(f"Answers that differ are in {out / 'compare.md'} and {out / 'compare.json'}.")


# ---------------------------------------------------------------------------
# What is compared


def compare_runs(
    a: str, b: str, *, tasks: Sequence[str] | None = None, mode: str | None = None
) -> Comparison:
    """Returns the differences of two runs on every task, mode and metric that both have.

    Args:
        a: Folder of a run, or NAME=FOLDER for a model other than its first.
        b: The other run, written in the same way.
        tasks: Names of tasks; None compares all that both have.
        mode: How the models answered; None for all that both have.

    Raises:
        ConfigError: When a task or model is in neither run, or both sides are one.
        DataError: When nothing is in common, something is missing, or the examples are not the
            same.
    """
    first = _read_side(a)
    second = _read_side(b)
    if (first.name, first.folder.resolve()) == (second.name, second.folder.resolve()):
        raise ConfigError(
            f"A and B are both model {first.name!r} of {first.folder}. Name another: NAME=FOLDER."
        )

    common, left_out = _common_tasks(first, second, tasks, mode)
    return Comparison(
        a=ComparedModel(first.name, str(first.folder)),
        b=ComparedModel(second.name, str(second.folder)),
        tasks=[_compare_task(first, second, task, mode) for task, mode in common],
        left_out=left_out,
    )


def _read_side(text: str) -> Side:
    """Returns the model of a run that `FOLDER` or `NAME=FOLDER` names."""
    name = ""
    folder = text
    is_named = "=" in text and not Path(text).exists()
    if is_named:
        name, _, folder = text.partition("=")
    if not text or (is_named and not name):
        raise ConfigError(
            f"{text!r} is empty, or names no run with a report.json. Give FOLDER or NAME=FOLDER."
        )

    # The first model, unless another is named.
    report = read_report(Path(folder))
    names = list(report.models)
    if name and name not in names:
        raise ConfigError(
            f"There is no model {name!r} in {folder}.{did_you_mean(name, names)} It has {', '.join(names)}."
        )
    path = Path(folder)
    home = path if path.is_dir() else path.parent
    return Side(name or names[0], home, report, {task.task: task for task in report.tasks})


def _common_tasks(
    a: Side, b: Side, tasks: Sequence[str] | None, mode: str | None
) -> tuple[list[tuple[str, str]], list[str]]:
    """Returns the tasks and modes of both, and a sentence for each that one of them lacks."""
    common: list[tuple[str, str]] = []
    left_out: list[str] = []
    for task in tasks or dict.fromkeys([*a.tasks, *b.tasks]):
        modes_a = a.modes(task)
        modes_b = b.modes(task)
        if tasks and not modes_a and not modes_b:
            known = sorted({*a.tasks, *b.tasks})
            raise ConfigError(
                f"Neither run has a task {task!r}.{did_you_mean(task, known)} They have {', '.join(known) or 'none'}."
            )

        # A mode in which only one side answered is left out and reported.
        for task_mode in dict.fromkeys([*modes_a, *modes_b]):
            if mode not in (None, task_mode):
                continue
            if _is_hidden(a, task) or _is_hidden(b, task):
                left_out.append(f"{task} by {task_mode} is not scored: its labels are hidden.")
            elif task_mode in modes_a and task_mode in modes_b:
                common.append((task, task_mode))
            else:
                side = "A" if task_mode in modes_a else "B"
                left_out.append(f"{task} by {task_mode} is in {side} only.")

    if not common:
        wanted = f" of --mode {mode}" if mode else ""
        raise DataError(
            f"The runs have nothing{wanted} in common: `{a.name}` of {a.folder} has {_list_tasks(a)}; "
            f"`{b.name}` of {b.folder} has {_list_tasks(b)}. {' '.join(left_out)} "
            "Run both on the same tasks, in splits with labels."
        )
    return common, left_out


def _is_hidden(side: Side, task: str) -> bool:
    return task in side.tasks and side.tasks[task].num_hidden > 0


def _list_tasks(side: Side) -> str:
    """Returns the tasks that a side answered, and the modes."""
    tasks = [f"{task} ({', '.join(side.modes(task))})" for task in side.tasks]
    return ", ".join(tasks) or "nothing"


def _check_same_examples(a: Side, b: Side, name: str) -> Task:
    """Returns the task, after checking that both sides answered the same examples of it.

    Raises:
        DataError: When they did not, or the library now scores the task otherwise.
    """
    task = find_task(name)
    first = a.tasks[name]
    second = b.tasks[name]

    # Actionable reasons come first.
    reasons = []
    for setting in ("version", "split", "limit", "num_examples"):
        value_a = getattr(first, setting)
        value_b = getattr(second, setting)
        if value_a != value_b:
            reasons.append(f"{setting} {value_a} in A and {value_b} in B")
    if not reasons and first.digest != second.digest:
        reasons = ["other data, of the same number"]
    if reasons:
        raise DataError(
            f"The runs answered different examples of {name}: {'; '.join(reasons)}. Run both in the same way, or "
            "leave the task out with --tasks."
        )

    if first.version != task.version:
        raise DataError(
            f"The runs answered version {first.version} of {name}; the library now has version {task.version}, which "
            "scores differently. Run both again."
        )
    return task


# ---------------------------------------------------------------------------
# How it is compared


def _compare_task(a: Side, b: Side, name: str, mode: str) -> TaskComparison:
    """Returns the differences of two sides on one task."""
    task = _check_same_examples(a, b, name)
    examples, outputs_a = read_answers(a.folder, a.report, a.tasks[name], a.name, mode)
    _, outputs_b = read_answers(b.folder, b.report, b.tasks[name], b.name, mode)
    groups = [example.group for example in examples]

    # Both sides are rescored from their answers.
    scored_a = score_answers(task.metrics, *task.values(examples, outputs_a))
    scored_b = score_answers(task.metrics, *task.values(examples, outputs_b))
    metrics = []
    for metric in task.metrics:
        metrics.append(compare_answers(metric, scored_a, scored_b, groups, task_seed(name)))

    # Examples with different scores, the largest difference first.
    each_a = scored_a.headline_scores  # [N]
    each_b = scored_b.headline_scores  # [N]
    gaps = np.abs(each_a - each_b)
    differences = []
    for row in (-gaps).argsort(kind="stable"):
        if gaps[row] > 0:
            example = examples[row]
            differences.append(
                ExampleDifference(
                    id=example.id,
                    inputs=shorten(example.inputs, _WRITTEN_CHARACTERS),
                    targets=shorten(example.targets, _WRITTEN_CHARACTERS),
                    a=shorten(outputs_a[row], _WRITTEN_CHARACTERS),
                    b=shorten(outputs_b[row], _WRITTEN_CHARACTERS),
                    score_a=float(each_a[row]),
                    score_b=float(each_b[row]),
                )
            )

    pairs = zip(outputs_a, outputs_b, strict=True)
    return TaskComparison(
        task=name,
        mode=mode,
        version=task.version,
        split=a.tasks[name].split,
        num_examples=len(examples),
        num_groups=len(set(groups)),
        metrics=metrics,
        num_outputs_differ=sum(one != other for one, other in pairs),
        num_scores_differ=len(differences),
        examples=differences,
    )


# ---------------------------------------------------------------------------
# What is printed, and compare.md


def comparison_lines(comparison: Comparison) -> list[str]:
    """Returns a line for each task, mode and metric, and one for each task that was left out."""
    a = comparison.a.name
    b = comparison.b.name
    lines = []
    for task in comparison.tasks:
        for metric in task.metrics:
            difference = format_score(metric.difference, sign=True)
            p_value = _format_p_value(metric)
            lines.append(
                f"{task.task} by {task.mode}, {metric.metric}: {a} {format_score(metric.a)}, "
                f"{b} {format_score(metric.b)}; difference {difference} points "
                f"({_format_difference_interval(metric)}), p = {p_value}; "
                f"{metric.wins:,} wins, {metric.losses:,} losses, {metric.ties:,} ties"
            )
            if metric.note:
                lines.append(f"  {NOTED} {metric.note}.")
    return [*lines, *(f"Left out: {sentence}" for sentence in comparison.left_out)]


def comparison_markdown(comparison: Comparison) -> str:
    """Returns compare.md."""
    a = comparison.a
    b = comparison.b
    num_tests = sum(len(task.metrics) for task in comparison.tasks)
    by_chance = ""
    if num_tests > 1:
        by_chance = f"Of {num_tests} tests one in twenty falls below 0.05 by chance alone."

    lines = [
        "# Comparison",
        "",
        f"A is `{a.name}` of {a.folder}; B is `{b.name}` of {b.folder}.",
        "",
        "Difference is A - B in points, with its 95 % interval over groups of examples, which are the same for both; "
        "p is two-sided, of the paired permutation test that swaps whole groups. Wins are examples that A answers "
        "better.",
        "",
        by_chance,
        "",
    ]
    for task in comparison.tasks:
        lines += _task_section(task)
    lines += [f"- Left out: {sentence}" for sentence in comparison.left_out]
    return "\n".join(lines).rstrip() + "\n"


def _task_section(task: TaskComparison) -> list[str]:
    """Returns the lines about one task."""
    rows = []
    for metric in task.metrics:
        rows.append(
            [
                metric.metric,
                format_score(metric.a),
                format_score(metric.b),
                format_score(metric.difference, sign=True),
                _format_difference_interval(metric),
                _format_p_value(metric),
                str(metric.wins),
                str(metric.losses),
                str(metric.ties),
            ]
        )
    lines = [
        f"## {task.task} by {task.mode}",
        "",
        f"{task.num_examples:,} examples of the {task.split} split in {task.num_groups:,} groups. "
        f"{task.num_outputs_differ:,} answers differ, {task.num_scores_differ:,} of them in their score.",
        "",
        *markdown_table(_METRIC_HEADER, rows),
        "",
    ]
    noted = [metric for metric in task.metrics if metric.note]
    if noted:
        lines += [*(f"- {metric.metric}: {metric.note}." for metric in noted), ""]
    if not task.examples:
        return lines

    rows = []
    for example in task.examples[:_SHOWN_EXAMPLES]:
        texts = [example.inputs, example.targets, example.a, example.b]
        cells = [shorten(text, _SHOWN_CHARACTERS) for text in (example.id, *texts)]
        rows.append([*cells, format_score(example.score_a), format_score(example.score_b)])
    lines += [
        f"The largest of {len(task.examples):,} differences; all are in compare.json.",
        "",
        *markdown_table(_EXAMPLE_HEADER, rows),
        "",
    ]
    return lines


def _format_difference_interval(metric: MetricComparison) -> str:
    if metric.low is None or metric.high is None:
        return "-"
    mark = f" {NOTED}" if metric.note else ""
    low = format_score(metric.low, sign=True)
    high = format_score(metric.high, sign=True)
    return f"{low} to {high}{mark}"


def _format_p_value(metric: MetricComparison) -> str:
    if metric.p_value is None:
        return "-"
    return f"{metric.p_value:.4f}" + (" (exact)" if metric.exact else "")
