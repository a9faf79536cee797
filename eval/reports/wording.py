"""What reports say of models and tasks in words: the same in report.md and report.html."""

import math
from typing import Any

from eval.answers.predict import MODES

ROUTER_HEADER = ["system", "mode", "stack", "dropped", "load CV", "most / mean", "dead experts"]


def describe_checkpoint(model: dict[str, Any]) -> str:
    """Returns a sentence on a checkpoint: where it is, its size, and how it was chosen."""
    size = f"{model['parameters']:,} parameters"
    if model["active_parameters"] != model["parameters"]:
        size += f", of which a token uses {model['active_parameters']:,}"
    chosen, rule = model["chosen_by"], "how it was chosen among its run's checkpoints is not known"
    if model["last_of_run"]:
        rule = "the last of its run"
    if chosen:
        rule = f"chosen by the {chosen['rule']} of {', '.join(chosen['tasks'])} (step {chosen.get('step', '?')})"
    return (
        f"{model['folder']} ({model['class']}, {size}; fingerprint {model['fingerprint']}; {rule})"
    )


def describe_earlier(name: str) -> str:
    """Returns a sentence on the copy of an earlier report."""
    return (
        f"An earlier report of this folder has results that this one lacks: it is kept as `{name}`."
    )


def describe_data(task: dict[str, Any]) -> str:
    """Returns a sentence on where a task's examples are from, and how many there are."""
    data = task["data"]
    place = "Rows come with Python"
    if data["folder"]:
        place = f"Rows are from {data['folder']}"
    elif data["repository"]:
        place = f"Rows are from {data['repository']} ({data['config']}, {data['revision']})"
    expected = "" if task["num_expected"] is None else f" of {task['num_expected']:,} expected"
    return (
        f"{place}: {task['num_rows']:,}{expected} in the {task['split']} split; {task['num_examples']:,} examples in "
        f"{task['num_groups']:,} groups. Licence of the data: {task['licence']}. Prompt: {task['prompt_source']}."
    )


def compare_models(rows: list[dict[str, Any]]) -> list[str]:
    """Returns a sentence for each further model: whether its interval overlaps that of the first in
    the same mode.
    """
    sentences = []
    for mode in MODES:
        of_mode = [row for row in rows if row["mode"] == mode]
        for first, other in ((of_mode[0], other) for other in of_mode[1:]):
            ours, theirs = first["scores"][0], other["scores"][0]
            if ours["low"] is None or theirs["low"] is None:
                continue
            overlap = ours["low"] <= theirs["high"] and theirs["low"] <= ours["high"]
            relation = (
                "overlap; `python -m eval compare` tests them in pairs"
                if overlap
                else "do not overlap"
            )
            sentences.append(
                f"{mode}: `{first['name']}` is {ours['value'] - theirs['value']:+.1f} points from `{other['name']}`; "
                f"their 95 % intervals {relation}."
            )
    return sentences


def first_system(task: dict[str, Any]) -> str:
    """Returns which system's answers the classes, the worst answers and the lengths of a task are
    of.
    """
    row = task["systems"][0]
    return f"{row['name']} by {row['mode']}"


def describe_lengths(task: dict[str, Any]) -> str:
    """Returns a sentence on how long the inputs are."""
    lengths = task["inputs"]
    return (
        f"In tokens of `{task['systems'][0]['name']}`: {lengths['mean']:.1f} on average, half of the inputs have at "
        f"most {lengths['median']:.0f}, the longest {lengths['longest']:,}; {lengths['num_cut']:,} cut at "
        f"{lengths['limit']:,}."
    )


def score_notes(task: dict[str, Any]) -> list[str]:
    """Returns what is to be known of single scores."""
    return [
        f"{row['name']} by {row['mode']}, {score['metric']}: {score['note']}."
        for row in task["systems"]
        for score in row["scores"]
        if score["note"]
    ]


def router_rows(task: dict[str, Any]) -> list[list[str]]:
    """Returns what the routers of every system did, as the rows of a table."""
    return [
        [
            row["name"],
            row["mode"],
            stack,
            _figure(100 * found["fraction_dropped"], ".2f", " %"),
            _figure(found["load_cv"], ".2f"),
            _figure(found["max_over_mean"], ".2f"),
            _figure(found["dead_experts"], "g"),
        ]
        for row in task["systems"]
        for stack, found in (row["router"] or {}).items()
    ]


def _figure(value: float, form: str, unit: str = "") -> str:
    """Returns a number; `-` where no token makes it one."""
    return f"{value:{form}}{unit}" if math.isfinite(value) else "-"
