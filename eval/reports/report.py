"""The reports of an evaluation: report.json for programs, report.md and report.html for people,
card.md for a card.
"""

import json
import math
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from eval.answers.seq2seq import Seq2Seq
from eval.reports.card import card
from eval.reports.html_report import page
from eval.reports.markdown import cell, interval, number, table
from eval.reports.scoreboard import DIFFERS, Scoreboard, scoreboard
from eval.reports.wording import (
    ROUTER_HEADER,
    compare_models,
    describe_checkpoint,
    describe_data,
    describe_earlier,
    describe_lengths,
    first_system,
    router_rows,
    score_notes,
)
from eval.run_folder import REPORT, write_whole
from eval.sealed_json import seal
from moe import CheckpointError, STMoEConfig
from moe.checks import is_kind
from moe.parsing import read_json, to_record

_LIBRARIES = (
    "stmoe",
    "torch",
    "transformers",
    "datasets",
    "numpy",
    "scipy",
    "scikit-learn",
    "rouge-score",
)


def describe_place() -> dict[str, Any]:
    """Returns the versions of what computes the numbers, and the device."""
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # run from a source tree that is not installed
            continue
    on_gpu = torch.cuda.is_available()
    return {
        "versions": versions,
        "device": torch.cuda.get_device_name() if on_gpu else f"cpu ({platform.machine()})",
    }


def describe_model(folder: Path, system: Seq2Seq) -> dict[str, Any]:
    """Returns what the report says of a checkpoint; `chosen_by` is None unless its run kept its
    best one there.
    """
    config = system.model.config
    known = isinstance(config, STMoEConfig)
    return {
        "folder": str(folder),
        "fingerprint": system.fingerprint,
        "class": type(system.model).__name__,
        "parameters": config.num_parameters() if known else system.model.num_parameters(),
        "active_parameters": config.num_active_parameters()
        if known
        else system.model.num_parameters(),
        "chosen_by": _chosen_by(folder),
        "last_of_run": folder.name == "model"
        and (folder.absolute().parent / "recipe.yaml").is_file(),
    }


def _chosen_by(folder: Path) -> dict[str, Any] | None:
    """Returns by which dev scores a fine-tuning chose this checkpoint: it keeps the best in
    best/model.
    """
    path = folder.absolute().parent / "scores.json"
    if not path.is_file():
        return None
    advice = (
        "Restore it, or remove it: the report then says nothing of how the checkpoint was chosen."
    )
    content = read_json(path, advice=advice, error=CheckpointError, nan=True)
    scores = to_record(
        dict[str, int | float], content, where=str(path), advice=advice, error=CheckpointError
    )
    if not is_kind(scores.get("step", 0), int):
        raise CheckpointError(f"{path}: step is {scores['step']}; expected an integer. {advice}")
    tasks = list(dict.fromkeys(name.split("/")[0] for name in scores if "/" in name))
    return {"rule": "best mean score on the development splits", "tasks": tasks} | {
        name: scores[name] for name in ("step", "mean") if name in scores
    }


def write_reports(report: dict[str, Any], out: Path) -> None:
    """Writes report.json, report.md, report.html and card.md to `out`, each whole or not at all."""
    report = _plain(report)
    board = scoreboard(report)
    write_whole(
        out / REPORT, seal(json.dumps(_finite(report), indent=1, ensure_ascii=False)) + "\n"
    )
    write_whole(out / "report.md", markdown(report, board))
    write_whole(out / "report.html", page(report, board))
    write_whole(out / "card.md", card(report))


def _plain(value: Any) -> Any:
    """Returns a value whose texts are Unicode: bytes of paths that are not UTF-8 are escaped."""
    if isinstance(value, dict):
        return {_plain(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _finite(value: Any) -> Any:
    """Returns a value as JSON knows it: numbers that are not finite become null."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def markdown(report: dict[str, Any], board: Scoreboard) -> str:
    """Returns the report as Markdown."""
    parts = ["# Evaluation", "", f"Made by `{report['command']}`", ""]
    for name, model in report["models"].items():
        parts.append(f"- `{name}`: {describe_checkpoint(model)}")
    parts.append(
        "- " + ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    )
    parts += [f"- device: {report['device']}", ""]
    if report["earlier"]:
        parts += [describe_earlier(report["earlier"]), ""]
    for failure in report["failed"]:
        parts += [f"**{failure['task']} failed**: {' '.join(failure['message'].split())}", ""]
    parts += _scores(board)
    for task in report["tasks"]:
        parts += _task_section(task)
    return "\n".join(parts) + "\n"


def _scores(board: Scoreboard) -> list[str]:
    """Returns the lines of the table of all scores beside the published ones."""
    if not board.lines:
        return []
    rows = []
    for line in board.lines:
        row = [line.task + line.marks, line.metric, line.split]
        row += [
            f"{number(score['value'])} ({interval(score['low'], score['high'])})" if score else ""
            for score in line.ours
        ]
        row += [
            f"{number(one.value)}{'' if one.split == line.split else DIFFERS}" if one else ""
            for one in line.published
        ]
        rows.append(row)
    header = [
        "task",
        "metric",
        "split",
        *(f"{name}, {mode}" for name, mode in board.systems),
        *board.published,
    ]
    return [
        "## Scores",
        "",
        "In brackets 95 % bootstrap intervals over groups of examples.",
        "",
        *table(header, rows),
        "",
        *(f"- {sentence}" for sentence in board.legend),
        "",
    ]


def _task_section(task: dict[str, Any]) -> list[str]:
    """Returns the lines about one task."""
    lines = [
        f"## {task['task']} (version {task['version']})",
        "",
        task["description"],
        "",
        describe_data(task),
        "",
        *(f"- {sentence}" for sentence in task["notes"]),
        "",
        *table(
            [
                "system",
                "mode",
                "metric",
                "score",
                "95 % interval",
                "standard error",
                "unparsable",
                "empty",
            ],
            [
                [
                    row["name"],
                    row["mode"],
                    score["metric"],
                    number(score["value"]),
                    interval(score["low"], score["high"]),
                    "-" if score["stderr"] is None else f"{score['stderr']:.2f}",
                    "-" if row["num_unparsable"] is None else str(row["num_unparsable"]),
                    str(row["num_empty"]),
                ]
                for row in task["systems"]
                for score in row["scores"]
            ],
        ),
        "",
        *(f"- {sentence}" for sentence in [*score_notes(task), *compare_models(task["systems"])]),
        "",
    ]
    if any(row["router"] for row in task["systems"]):
        lines += ["### Routers", "", *table(ROUTER_HEADER, router_rows(task)), ""]
    lines += ["### Lengths of inputs", "", describe_lengths(task), ""]
    if task["by_class"]:
        header = ["target", "right", "examples", "answered"]
        rows = [
            [str(row[name]) for name in ("target", "right", "total", "answered")]
            for row in task["by_class"]
        ]
        lines += [f"### By class ({first_system(task)})", "", *table(header, rows), ""]
    if task["worst"]:
        rows = [
            [cell(row[name]) for name in ("id", "inputs", "target", "output")]
            + [number(row["score"])]
            for row in task["worst"]
        ]
        lines += [f"### Worst answers ({first_system(task)})", ""]
        lines += [*table(["id", "inputs", "target", "output", "score"], rows), ""]
    return lines
