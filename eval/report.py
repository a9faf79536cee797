"""The report of an evaluation: report.json for programs, report.md for people."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

_LIBRARIES = ("torch", "transformers", "scikit-learn")


def write_reports(report: dict[str, Any], out: Path) -> None:
    """Writes report.json and report.md to `out`, each whole or not at all."""
    report = {**report, "versions": {name: version(name) for name in _LIBRARIES}}
    out.mkdir(parents=True, exist_ok=True)
    _write_whole(out / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    _write_whole(out / "report.md", markdown(report))


def markdown(report: dict[str, Any]) -> str:
    """Returns the report as Markdown."""
    parts = ["# Evaluation", "", f"Made by `{report['command']}`", ""]
    parts += [f"- `{name}`: {folder}" for name, folder in report["models"].items()]
    parts += ["- " + ", ".join(f"{name} {number}" for name, number in report["versions"].items()), ""]
    for task in report["tasks"]:
        parts += _task_section(task)
    return "\n".join(parts) + "\n"


def compare_models(rows: list[dict[str, Any]]) -> list[str]:
    """Returns a sentence for each further model: whether its interval overlaps that of the first in the same mode."""
    models = [row for row in rows if row["mode"] != "baseline"]
    sentences = []
    for mode in dict.fromkeys(row["mode"] for row in models):
        first, *others = [row for row in models if row["mode"] == mode]
        for other in others:
            overlap = first["low"] <= other["high"] and other["low"] <= first["high"]
            relation = "overlap: no difference is shown" if overlap else "do not overlap"
            gap = 100 * (first["accuracy"] - other["accuracy"])
            sentences.append(
                f"{mode}: `{first['name']}` is {gap:+.1f} points from `{other['name']}`; "
                f"their 95 % intervals {relation}."
            )
    return sentences


def _task_section(task: dict[str, Any]) -> list[str]:
    """Returns the lines about one task."""
    lines = [
        f"## {task['task']} (version {task['version']})",
        "",
        f"{task['description']} Licence of the data: {task['licence']}.",
        "",
        f"{task['num_examples']:,} examples of the {task['split']} split in {task['num_groups']} groups; "
        f"{task['num_train']:,} for training. Intervals: 95 % bootstrap over groups.",
        "",
        *_table(
            ["system", "mode", "accuracy", "95 % interval", "unparsable"],
            [
                [
                    row["name"],
                    row["mode"],
                    f"{100 * row['accuracy']:.1f} %",
                    f"{100 * row['low']:.1f} to {100 * row['high']:.1f}",
                    str(row["num_unparsable"]),
                ]
                for row in task["systems"]
            ],
        ),
        "",
        *(f"- {sentence}" for sentence in compare_models(task["systems"])),
        "",
        "### By class (first system)",
        "",
        *_table(
            ["target", "right", "examples"],
            [[row["target"], str(row["right"]), str(row["total"])] for row in task["per_class"]],
        ),
        "",
        "### Some of its mistakes",
        "",
        *_table(
            ["id", "inputs", "target", "output"],
            [[row["id"], row["inputs"], row["target"], row["output"]] for row in task["mistakes"]],
        ),
        "",
    ]
    return lines


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *escaped]]


def _write_whole(path: Path, text: str) -> None:
    """Writes `text` aside and renames it to `path`."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
