"""The panel on evaluations: scores as bars, sentences and a table, from the report.json of `stmoe eval run`.

A report is read as the dictionary that it is; see `stmoe_eval.reports.records` for its fields.
"""

import math
from pathlib import Path
from typing import Any

from moe.estimates import Estimate
from moe.inspection.figures import draw_scores
from moe.inspection.formatting import format_interval, format_score, format_versions
from moe.parsing import read_json, read_json_lines, reading

Report = dict[str, Any]

_ADVICE = "Give the report.json of `stmoe eval run`."
_SHOWN_ANSWERS = 12


def read_evaluation(path: Path) -> Report:
    """Returns the evaluation in a report.json, with what the page shows of each task.

    A task gets `answers`, some inputs with the first system's answer and the target; `figure`, a
    chart of the comparable scores, None for none; `comparisons`, sentences; `size`, a sentence; and
    `rows`, its scores as texts. `failures` says which tasks failed.

    Args:
        path: The report.json, or the folder that contains it.

    Raises:
        DataError: When it is missing, damaged or something else.
    """
    file = path / "report.json" if path.is_dir() else path
    with reading(file, advice=_ADVICE, problem="is not an evaluation"):
        report = read_json(file, advice=_ADVICE)
        model_sentences("", report)  # which must be readable, too
        report["failures"] = [
            f"{failure['task']} failed: {failure['message']}"
            for failure in report.get("failed", ())
        ]
        if not isinstance(report["tasks"], list):
            raise ValueError("its tasks are not a list")
        for task in report["tasks"]:
            if not all(isinstance(task[name], str) for name in ("task", "description", "split")):
                raise ValueError("a name is not a text")
            task["size"] = (
                f"{task['description']} {task['num_examples']:,} examples of the {task['split']} split in "
                f"{task['num_groups']:,} groups."
            )
            rows = []
            for system in task["systems"]:
                for score in system["scores"]:
                    interval = format_interval(score["low"], score["high"])
                    value = format_score(score["value"])
                    rows.append([system["name"], system["mode"], score["metric"], value, interval])
            task["rows"] = rows
            task["answers"] = _read_answers(file.parent, task)
            task["figure"] = _figure(task)
            task["comparisons"] = system_comparisons(task)
    return report


def _read_answers(folder: Path, task: Report) -> list[tuple[str, str, str]]:
    """Returns some inputs, answers of the first system and targets, evenly spaced; none without its files."""
    system = task["systems"][0]
    examples = folder / f"examples/{task['task']}.jsonl"
    predictions = folder / f"predictions/{task['task']}.{system['name']}.{system['mode']}.jsonl"
    if not examples.is_file() or not predictions.is_file():
        return []

    # Lines without an output close a batch.
    outputs = {}
    for _, line in read_json_lines(predictions, advice=_ADVICE):
        if "output" in line:
            outputs[line["id"]] = line["output"]
    rows = []
    for _, line in read_json_lines(examples, advice=_ADVICE):
        if line["id"] in outputs:
            rows.append((line["inputs"], outputs[line["id"]], line["targets"]))
    number = min(_SHOWN_ANSWERS, len(rows))
    return [rows[(2 * index + 1) * len(rows) // (2 * number)] for index in range(number)]


def _comparable_systems(task: Report) -> list[Report]:
    """Returns the first system, those with its mode and metric, and the baselines; none without its score."""
    first = task["systems"][0]
    if first["scores"][0]["value"] is None:
        return []
    systems = []
    for system in task["systems"]:
        score = system["scores"][0]
        has_mode = system["mode"] in (first["mode"], "baseline")
        is_same = score["metric"] == first["scores"][0]["metric"]
        if has_mode and is_same and score["value"] is not None:
            systems.append(system)
    return systems


def system_comparisons(task: Report) -> list[str]:
    """Returns the score of the first system, and how it differs from those that can be compared."""
    first = task["systems"][0]
    ours = first["scores"][0]
    sentences = []
    for other in _comparable_systems(task):
        theirs = other["scores"][0]
        if other is first:
            sentences.append(
                f"{first['name']} by {first['mode']}: {_score(ours)} {ours['metric']}."
            )
            continue
        gap = ours["value"] - theirs["value"]
        direction = "below" if gap < 0 else "above"
        sentence = f"{abs(gap):.1f} points {direction} {other['name']}: {_score(theirs)}"

        # Scores without intervals cannot be compared.
        if None not in (ours["low"], ours["high"], theirs["low"], theirs["high"]):
            overlap = ours["low"] <= theirs["high"] and theirs["low"] <= ours["high"]
            sentence += f"; the intervals {'overlap' if overlap else 'do not overlap'}"
        sentences.append(f"{sentence}.")
    return sentences


def _score(score: Report) -> str:
    """Returns e.g. `16.6 % (12.8 to 21.3)`."""
    text = f"{format_score(score['value'])} %"
    if score["low"] is None or score["high"] is None:
        return text
    return f"{text} ({format_interval(score['low'], score['high'])})"


def _figure(task: Report) -> str | None:
    """Returns the first score of each system that can be compared with the first one; None for no score."""
    bars = {}
    for system in _comparable_systems(task):
        score = system["scores"][0]
        ends = [math.nan if score[end] is None else score[end] for end in ("low", "high")]
        name = f"{system['name']}: {format_score(score['value'])} %"
        bars[name] = Estimate(score["value"], *ends)
    if not bars:
        return None
    metric = task["systems"][0]["scores"][0]["metric"]
    return draw_scores(bars, title=metric, label="score (%), with 95 % interval")


def model_sentences(fingerprint: str, report: Report) -> list[str]:
    """Returns which models were evaluated, and whether the one of a fingerprint is among them."""
    sentences = []
    for name, evaluated in report["models"].items():
        relation = f"not the traced model: fingerprint {evaluated['fingerprint']}"
        if evaluated["fingerprint"] == fingerprint:
            relation = "the traced model"
        sentences.append(f"{name} is {evaluated['folder']}, {relation}.")
    if report.get("versions"):
        sentences.append(f"Evaluated with {format_versions(report['versions'])}.")
    return sentences
