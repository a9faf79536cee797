"""python -m eval compare A B: two runs on the same examples, without any model."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eval.answers.predict import MODES
from eval.commands.command import Subparsers, name_list
from eval.reports.markdown import cell, number, shorten, table
from eval.run_folder import Answers, Entry, Report, read_answers, read_report, write_whole
from eval.scores.intervals import judge, seed_of
from eval.scores.pairing import compare_answers
from eval.task import TASKS, Task
from moe import ConfigError, DataError, did_you_mean
from moe.files import check_kind, claim_folder, output_path

_SHOWN = 10
_WRITTEN_CHARACTERS = 500


class Side(NamedTuple):
    """One of the two: a model of a run.

    Attributes:
        name: Of the model in the run.
        report: Of the run.
    """

    name: str
    report: Report

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.report.folder

    @property
    def tasks(self) -> dict[str, Entry]:
        """Entries of the report by task."""
        return self.report.tasks


def add_parser(commands: Subparsers) -> None:
    """Adds `compare` to the sub-commands."""
    parser = commands.add_parser(
        "compare",
        help="compares two runs on the same examples",
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


def run(arguments: argparse.Namespace) -> None:
    """Compares, writes compare.json and compare.md, and prints the latter."""
    out = output_path(arguments.out)
    check_kind(out, "comparison")
    result = compare_runs(arguments.a, arguments.b, tasks=arguments.tasks, mode=arguments.mode)
    text = markdown(result)
    with claim_folder(
        out,
        "comparison",
        taken=f"Another comparison writes to {out}. Wait for it, or give another --out.",
    ):
        write_whole(out / "compare.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        write_whole(out / "compare.md", text)
    print(text)
    print(f"The comparison is {out / 'compare.json'} and {out / 'compare.md'}.")


def compare_runs(
    a: str, b: str, *, tasks: Sequence[str] | None = None, mode: str | None = None
) -> dict[str, Any]:
    """Returns how two runs differ on every task, mode and metric that both have.

    Args:
        a: Folder of a run, or NAME=FOLDER for another than its first model.
        b: The same.
        tasks: Which; None for all that both have.
        mode: Which; None for all that both have.

    Raises:
        ConfigError: When a task or model is in neither run, or both sides are one.
        DataError: When nothing is in common, something is missing, or the examples are not the
            same.
    """
    first, second = _side(a), _side(b)
    if (first.name, first.folder.resolve()) == (second.name, second.folder.resolve()):
        raise ConfigError(
            f"A and B are both model {first.name!r} of {first.folder}. Name another: NAME=FOLDER."
        )
    pairs, left_out = _common(first, second, tasks, mode)
    return {
        "a": {"name": first.name, "folder": str(first.folder)},
        "b": {"name": second.name, "folder": str(second.folder)},
        "tasks": [_compare_task(first, second, task, mode) for task, mode in pairs],
        "left_out": left_out,
    }


def markdown(result: dict[str, Any]) -> str:
    """Returns a comparison as Markdown."""
    a, b = result["a"], result["b"]
    num_tests = sum(len(task["metrics"]) for task in result["tasks"])
    lines = [
        "# Comparison",
        "",
        f"A is `{a['name']}` of {a['folder']}; B is `{b['name']}` of {b['folder']}.",
        "",
        "Difference is A - B in points, with the 95 % interval of paired bootstrap draws; p is two-sided, of the "
        "paired permutation test that swaps whole groups. Wins are examples that A answers better.",
        "",
        f"Of {num_tests} tests one in twenty falls below 0.05 by chance alone."
        if num_tests > 1
        else "",
        "",
    ]
    for task in result["tasks"]:
        lines += _section(task)
    lines += [f"- Left out: {sentence}" for sentence in result["left_out"]]
    return "\n".join(lines).rstrip() + "\n"


def _section(task: dict[str, Any]) -> list[str]:
    """Returns the lines about one task and mode."""
    rows = []
    for row in task["metrics"]:
        low, high = number(row["low"], sign=True), number(row["high"], sign=True)
        p = (
            "-"
            if row["p_value"] is None
            else f"{row['p_value']:.4f}{' (exact)' if row['exact'] else ''}"
        )
        interval = f"{low} to {high}" if row["low"] is not None else "-"
        scores = [number(row["a"]), number(row["b"]), number(row["difference"], sign=True)]
        rows.append(
            [
                row["metric"],
                *scores,
                interval,
                p,
                *(str(row[name]) for name in ("wins", "losses", "ties")),
            ]
        )
    lines = [
        f"## {task['task']} by {task['mode']}",
        "",
        f"{task['num_examples']:,} examples of the {task['split']} split in {task['num_groups']:,} groups. "
        f"{task['num_outputs_differ']:,} answers differ, {task['num_scores_differ']:,} of them in their score.",
        "",
        *table(["metric", "A", "B", "A - B", "95 % interval", "p", "wins", "losses", "ties"], rows),
        "",
    ]
    if task["examples"]:
        shown = [
            [cell(row[name]) for name in ("id", "inputs", "targets", "a", "b")]
            + [number(row["score_a"]), number(row["score_b"])]
            for row in task["examples"][:_SHOWN]
        ]
        lines += [
            f"The largest of {len(task['examples']):,} differences; all are in compare.json.",
            "",
            *table(["id", "inputs", "target", "A", "B", "score A", "score B"], shown),
            "",
        ]
    return lines


def _side(value: str) -> Side:
    """Returns the model of a run that `FOLDER` or `NAME=FOLDER` says."""
    name, separator, folder = value.partition("=") if not Path(value).exists() else ("", "", value)
    name, folder = (name, Path(folder)) if separator else ("", Path(value))
    if (separator and not name) or not value or "\0" in value:
        raise ConfigError(
            f"{value!r} is empty, or names no run with a report.json. Give FOLDER or NAME=FOLDER."
        )
    report = read_report(folder)
    names = list(report.fingerprints)
    if name and name not in names:
        raise ConfigError(
            f"There is no model {name!r} in {folder}.{did_you_mean(name, names)} It has {', '.join(names)}."
        )
    return Side(name or names[0], report)


def _common(
    a: Side, b: Side, tasks: Sequence[str] | None, mode: str | None
) -> tuple[list[tuple[str, str]], list[str]]:
    """Returns the tasks and modes of both, and a sentence for each that one of them lacks."""
    pairs, left_out = [], []
    for name in tasks or dict.fromkeys([*a.tasks, *b.tasks]):
        modes = [_modes(side, name) for side in (a, b)]
        if tasks and not any(modes):
            known = sorted({*a.tasks, *b.tasks})
            raise ConfigError(
                f"Neither run has a task {name!r}.{did_you_mean(name, known)} They have {', '.join(known) or 'none'}."
            )
        for each in dict.fromkeys([*modes[0], *modes[1]]):
            if mode not in (None, each):
                continue
            if each in modes[0] and each in modes[1]:
                pairs.append((name, each))
            else:
                left_out.append(f"{name} by {each} is in {'A' if each in modes[0] else 'B'} only.")
    if not pairs:
        has = [
            ", ".join(f"{name} ({', '.join(_modes(side, name))})" for name in side.tasks)
            for side in (a, b)
        ]
        wanted = f" of --mode {mode}" if mode else ""
        raise DataError(
            f"The runs have nothing{wanted} in common: `{a.name}` of {a.folder} has {has[0] or 'nothing'}; "
            f"`{b.name}` of {b.folder} has {has[1] or 'nothing'}. Run both on the same tasks."
        )
    return pairs, left_out


def _modes(side: Side, task: str) -> list[str]:
    """Returns how a side's model answered a task."""
    rows = side.tasks[task].systems if task in side.tasks else []
    return [row.mode for row in rows if row.name == side.name and row.mode in MODES]


def _compare_task(a: Side, b: Side, name: str, mode: str) -> dict[str, Any]:
    """Returns how two sides differ on one task."""
    task = _same_examples(a, b, name)
    answers = [read_answers(side.report, name, side.name, mode) for side in (a, b)]
    examples, groups = answers[0].examples, [example.group for example in answers[0].examples]
    first, second = (judge(task.metrics, *task.values(examples, side.outputs)) for side in answers)
    metrics = []
    for metric in task.metrics:
        pair = compare_answers(metric, first, second, groups, seed_of(name))
        difference = pair.difference
        metrics.append(
            {
                **pair._asdict(),
                "difference": difference.value,
                "low": difference.low,
                "high": difference.high,
            }
        )
    scores = (first.examples, second.examples)
    gaps = scores[0] - scores[1]
    order = [int(i) for i in (-abs(gaps)).argsort(kind="stable") if abs(gaps[i]) > 0]
    return {
        "task": name,
        "mode": mode,
        "version": task.version,
        "split": a.tasks[name].split,
        "num_examples": len(examples),
        "num_groups": len(set(groups)),
        "metrics": metrics,
        "num_outputs_differ": sum(
            x != y for x, y in zip(answers[0].outputs, answers[1].outputs, strict=True)
        ),
        "num_scores_differ": len(order),
        "examples": [_difference(answers, scores, row) for row in order],
    }


def _difference(answers: Sequence[Answers], scores: Sequence[Any], row: int) -> dict[str, Any]:
    """Returns one example that two systems answer with another score."""
    example = answers[0].examples[row]
    return {
        "id": example.id,
        "inputs": shorten(example.inputs, _WRITTEN_CHARACTERS),
        "targets": shorten(example.targets, _WRITTEN_CHARACTERS),
        "a": shorten(answers[0].outputs[row], _WRITTEN_CHARACTERS),
        "b": shorten(answers[1].outputs[row], _WRITTEN_CHARACTERS),
        "score_a": float(scores[0][row]),
        "score_b": float(scores[1][row]),
    }


def _same_examples(a: Side, b: Side, name: str) -> Task:
    """Returns the task, after checking that both sides answered the same examples of it."""
    task = TASKS.get(name)
    first, second = a.tasks[name], b.tasks[name]
    reasons = [
        f"{what} {getattr(first, what)} in A and {getattr(second, what)} in B"
        for what in ("version", "split", "limit", "num_examples")
        if getattr(first, what) != getattr(second, what)
    ]
    if not reasons and first.digest != second.digest:
        reasons = ["other data, of the same number"]
    if reasons:
        raise DataError(
            f"The runs did not answer the same examples of {name}: {'; '.join(reasons)}. Run both in the same way, "
            "or leave the task out with --tasks."
        )
    if first.version != task.version:
        raise DataError(
            f"The runs answered version {first.version} of {name}; the library now has version {task.version}, which "
            "scores otherwise. Run both again."
        )
    return task
