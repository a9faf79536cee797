"""What a report says of one task: scores, classes, worst answers, lengths, and what makes them not
comparable.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.reports.markdown import shorten
from eval.reports.published import published
from eval.scores.intervals import judge, score_metrics, seed_of
from eval.scores.metrics import Values, bare_values
from eval.task import Example, Task

_SHOWN = 10
_KEPT_CHARACTERS = 1000
_BINS = 16
_TWO_METRICS = ("cb", "multirc", "record")


def score_row(
    task: Task,
    examples: Sequence[Example],
    outputs: Sequence[str],
    name: str,
    mode: str,
    router: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, NDArray[np.float64]], NDArray[np.float64]]:
    """Returns one line of the report, the draws of each metric, and <float64>[N] how well each
    example was answered.

    Args:
        task: Gives metrics and choices.
        examples: That were asked.
        outputs: An answer to each.
        name: Of the system.
        mode: How it answered.
        router: What its routers did; None for a dense model.
    """
    judged = judge(task.metrics, *task.values(examples, outputs))
    groups = [example.group for example in examples]
    scores, draws = score_metrics(judged, groups, seed_of(task.name))
    row = {
        "name": name,
        "mode": mode,
        "scores": [{"metric": metric, **score._asdict()} for metric, score in scores.items()],
        "num_examples": len(examples),
        "num_unparsable": count_unparsable(judged.targets, judged.answers),
        "num_empty": sum(not output.strip() for output in outputs),
        "router": router,
    }
    return row, draws, judged.examples


def count_unparsable(targets: Values, answers: Values) -> int | None:
    """Returns how many post-processed answers are -1, no valid one; None where targets are no
    numbers but texts.
    """
    if not all(isinstance(target, int) for target in bare_values(targets)):
        return None
    return sum(answer == -1 for answer in bare_values(answers))


def is_classification(task: Task) -> bool:
    """Returns whether every target is one of a few choices."""
    return bool(task.choices) and not callable(task.choices)


def by_class(
    task: Task, examples: Sequence[Example], outputs: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns for each target of a classification its examples, the right ones, and how often it
    was answered.
    """
    if not is_classification(task):
        return []
    totals = Counter(example.targets for example in examples)
    right = Counter(
        e.targets for e, output in zip(examples, outputs, strict=True) if e.targets == output
    )
    answered = Counter(outputs)
    return [
        {
            "target": target,
            "right": right[target],
            "total": totals[target],
            "answered": answered[target],
        }
        for target in sorted(totals | Counter({choice: 0 for choice in examples[0].choices}))
        if totals[target] or answered[target]
    ]


def worst(
    examples: Sequence[Example], outputs: Sequence[str], each: NDArray[np.float64]
) -> list[dict[str, Any]]:
    """Returns the examples of the lowest score below full marks; where many have the lowest, some
    evenly among them.

    Args:
        examples: That were asked.
        outputs: An answer to each.
        each: <float64>[N] how well, as `score_row` says.
    """
    order = [int(row) for row in np.argsort(each, kind="stable") if each[row] < 100.0 - 1e-9]
    lowest = [row for row in order if each[row] <= each[order[0]]]
    if len(lowest) > _SHOWN:
        order = [lowest[i * len(lowest) // _SHOWN] for i in range(_SHOWN)]
    return [
        {
            "id": examples[row].id,
            "inputs": shorten(examples[row].inputs, _KEPT_CHARACTERS),
            "target": shorten(examples[row].targets, _KEPT_CHARACTERS),
            "output": shorten(outputs[row], _KEPT_CHARACTERS),
            "score": float(each[row]),
        }
        for row in order[:_SHOWN]
    ]


def input_lengths(examples: Sequence[Example], tokenizer: Any, most: int) -> dict[str, Any]:
    """Returns how the lengths of inputs in tokens, end included, are distributed, and how many were
    cut.

    Args:
        examples: Whose inputs.
        tokenizer: Of the model.
        most: Tokens that the model sees of an input; the tokenizer's own limit may be lower.
    """
    most = min(most, tokenizer.model_max_length)
    encoded = tokenizer([example.inputs for example in examples], truncation=False, verbose=False)[
        "input_ids"
    ]
    lengths = np.asarray([len(ids) for ids in encoded])
    top = int(lengths.max())
    width = max(1, -(-(top + 1) // _BINS))
    counts = np.bincount(lengths // width, minlength=top // width + 1)
    return {
        "mean": float(lengths.mean()),
        "median": float(np.median(lengths)),
        "longest": top,
        "limit": most,
        "num_cut": int((lengths > most).sum()),
        "histogram": [
            {"from": i * width, "to": (i + 1) * width - 1, "count": int(count)}
            for i, count in enumerate(counts)
        ],
    }


def notes_of(entry: dict[str, Any], models: Mapping[str, dict[str, Any]]) -> list[str]:
    """Returns sentences on what keeps the scores of a task from being compared with published ones.

    Args:
        entry: Of the task in report.json.
        models: Those of report.json; one that was chosen on the split of the report is named.
    """
    notes = []
    if entry["data"]["folder"]:
        notes.append(
            f"Rows are from {entry['data']['folder']}, not from the hub: not comparable with published scores."
        )
    found, expected = entry["num_rows"], entry["num_expected"]
    if expected is not None and found != expected:
        notes.append(
            f"{found:,} rows of {expected:,} that the published split has: not comparable with published scores."
        )
    if entry["limit"] is not None:
        notes.append(
            f"--limit {entry['limit']:,}: {entry['num_examples']:,} of {entry['num_available']:,} examples, whole "
            "groups evenly taken: not comparable with published scores."
        )
    known = [score["metric"] for row in entry["systems"] for score in row["scores"]]
    names = (entry["task"], entry["variant_of"] or "")
    if entry["prompt_source"] != "T5" and any(
        published(name, metric) for name in names for metric in known
    ):
        notes.append(
            f"The prompt is of {entry['prompt_source']}; published results may stand on another one."
        )
    if entry["inputs"] and (num_cut := entry["inputs"]["num_cut"]):
        notes.append(f"{num_cut:,} inputs were cut to {entry['inputs']['limit']:,} tokens.")
    for name, model in models.items():
        chosen = model["chosen_by"]
        if chosen and entry["split"] == "validation" and entry["task"] in chosen["tasks"]:
            notes.append(
                f"The checkpoint of `{name}` is the best of its run on this same split: its scores are optimistic. "
                "The paper reports such peaks too."
            )
    return notes


def headline(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the first score of a line of the report."""
    return row["scores"][0]


def task_score(task: str, scores: Sequence[Any]) -> Any:
    """Returns a task's part in an average: its first metric, in cb, multirc and record the mean of
    its two.

    Args:
        task: Its name.
        scores: Of its metrics in their order; numbers, None for what is not defined, or
            <float64>[R] draws of them.
    """
    values = [np.asarray(np.nan if score is None else score) for score in scores]
    part = np.mean(values[:2] if task in _TWO_METRICS else values[:1], axis=0)
    return part if part.ndim else float(part)
