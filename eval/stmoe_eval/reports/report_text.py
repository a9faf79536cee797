"""Sentences about models and tasks, and the rows of their tables: the same in report.md and
report.html.
"""

import math
from collections.abc import Sequence

from moe.inspection.formatting import format_interval, format_score
from stmoe_eval.answers.cost import FLOPS_FORMULA as FLOPS_FORMULA
from stmoe_eval.answers.predict import MODES
from stmoe_eval.reports.formatting import format_marked_interval
from stmoe_eval.reports.records import (
    Contamination,
    MetricScore,
    ModelInfo,
    Report,
    SystemResult,
    TaskResult,
)
from stmoe_eval.reports.scoreboard import NOT_SCORED

SCORE_HEADER = [
    "system",
    "mode",
    "metric",
    "score (%)",
    "95 % interval (%)",
    "standard error (points)",
    "unparsable",
    "empty",
]
CLEAN_HEADER = [
    "system",
    "mode",
    "metric",
    "all examples (%)",
    "clean examples (%)",
    "95 % interval (%)",
]
ROUTER_HEADER = ["system", "mode", "stack", "dropped", "load CV", "max / mean", "dead experts"]
COST_HEADER = ["system", "mode", "input tokens", "output tokens", "FLOPs per example", "tokens/s"]
CALIBRATION_SENTENCE = (
    "ECE, the expected calibration error, is the mean distance between confidence and accuracy over 15 "
    "bins of confidence. The Brier score lies between 0 and 2. Lower is better for both."
)
CALIBRATION_HEADER = ["system", "mode", "ECE (points)", "Brier score", "examples"]
CLASS_HEADER = ["target", "right", "examples", "answered"]
WORST_HEADER = ["id", "inputs", "target", "output", "score"]


def model_sentence(model: ModelInfo) -> str:
    """Returns where a checkpoint is, its size, and how it was chosen, if known."""
    size = f"{model.parameters:,} parameters"
    if model.active_parameters != model.parameters:
        size += f" ({model.active_parameters:,} active)"
    parts = [model.class_name, size, model.dtype]
    if model.capacity == "none":
        parts.append("no capacity limit")
    elif model.capacity is not None:
        parts.append(f"capacity {model.capacity}")

    if model.chosen_by:
        step = "" if model.chosen_by.step is None else f"step {model.chosen_by.step}, "
        tasks = ", ".join(model.chosen_by.tasks)
        parts.append(f"{step}chosen by the {model.chosen_by.rule} of {tasks}")
    elif model.last_of_run:
        parts.append("last checkpoint of its run")
    return f"{model.folder}: {', '.join(parts)}; fingerprint {model.fingerprint}"


def earlier_report_sentence(name: str) -> str:
    """Returns the path of the copy of an earlier report."""
    return f"An earlier report in this folder has results that this one does not have. It is kept as `{name}`."


def data_sentence(task: TaskResult) -> str:
    """Returns the origin and the number of a task's examples."""
    origin = f"Data: {task.data.origin}"
    if task.data.folder:
        origin = f"Data: {task.data.folder}"
    elif task.data.repository:
        origin = f"Data: {task.data.repository} ({task.data.config}, {task.data.revision})"
    expected = "" if task.num_expected is None else f" of {task.num_expected:,} expected"
    return (
        f"{origin}, licence {task.licence}. The {task.split} split has {task.num_rows:,}{expected} rows: "
        f"{task.num_examples:,} examples in {task.num_groups:,} groups. Prompt: {task.prompt_source}."
    )


def lengths_sentence(task: TaskResult) -> str:
    """Returns the lengths of the inputs."""
    lengths = task.inputs
    return (
        f"Tokens of `{task.systems[0].name}` per input: mean {lengths.mean:.1f}, median "
        f"{lengths.median:.0f}, maximum {lengths.longest:,}. {lengths.num_cut:,} inputs were cut to "
        f"{lengths.limit:,} tokens."
    )


def contamination_sentence(contamination: Contamination) -> str:
    """Returns how many of the examples overlap with a corpus, and how many are clean."""
    parts = []
    for overlap in contamination.overlaps:
        parts.append(
            f"{100 * overlap.share_of_inputs:.1f} % share {overlap.n} consecutive words with it "
            f"({100 * overlap.share_of_ngrams:.2f} % of their n-grams)"
        )
    first = contamination.overlaps[0]
    return (
        f"{first.num_compared:,} of {first.num_inputs:,} inputs are long enough to be compared with "
        f"{contamination.corpus}: {', '.join(parts)}. {contamination.num_clean:,} examples are clean."
    )


def first_system(task: TaskResult) -> str:
    """Returns the system whose classes, worst answers and lengths the report shows."""
    system = task.systems[0]
    return f"{system.name} by {system.mode}"


def remarks(task: TaskResult) -> list[str]:
    """Returns settings of metrics, notes on single scores, and how systems compare."""
    return [
        *signature_sentences(task),
        *score_notes(task),
        *model_comparisons(task.systems),
        *baseline_notes(task.systems),
    ]


def score_notes(task: TaskResult) -> list[str]:
    """Returns caveats about single scores."""
    sentences = []
    for system in task.systems:
        for score in system.scores:
            if score.note:
                name = f"{system.name} by {system.mode}, {score.metric}"
                sentences.append(f"{name}: {score.note}.")
    return sentences


def baseline_notes(systems: Sequence[SystemResult]) -> list[str]:
    """Returns the training data of the baselines, one sentence for all that share it."""
    names: dict[str, list[str]] = {}
    for system in systems:
        if system.fitted_to is not None:
            names.setdefault(system.fitted_to, []).append(system.name)
    return [f"{', '.join(names[what])}: fitted to {what}." for what in names]


def signature_sentences(task: TaskResult) -> list[str]:
    """Returns the library, version and settings that computed the metrics."""
    return [f"{metric}: {signature}." for metric, signature in task.signatures.items()]


def model_comparisons(systems: Sequence[SystemResult]) -> list[str]:
    """Returns a sentence for each further model: how far it is from the first in the same mode, and
    whether their intervals overlap.
    """
    sentences = []
    for mode in MODES:
        of_mode = [system for system in systems if system.mode == mode]
        for other in of_mode[1:]:
            first = of_mode[0]
            if not first.scores or not other.scores:
                continue
            ours = first.scores[0]
            theirs = other.scores[0]
            if ours.value is None or ours.low is None or ours.high is None:
                continue
            if theirs.value is None or theirs.low is None or theirs.high is None:
                continue

            relation = "do not overlap"
            if ours.low <= theirs.high and theirs.low <= ours.high:
                relation = "overlap; `stmoe eval compare` tests the difference"
            gap = ours.value - theirs.value
            direction = "below" if gap < 0 else "above"
            sentences.append(
                f"{mode}: `{first.name}` is {abs(gap):.1f} points {direction} `{other.name}`; "
                f"their 95 % intervals {relation}."
            )
    return sentences


# ---------------------------------------------------------------------------
# Rows of tables


def score_rows(task: TaskResult) -> list[list[str]]:
    """Returns a row under SCORE_HEADER for each system and metric."""
    rows = []
    for system in task.systems:
        unparsable = "-" if system.num_unparsable is None else f"{system.num_unparsable:,}"
        empty = f"{system.num_empty:,}"
        if not system.scores:
            unscored = [system.name, system.mode, NOT_SCORED, "-", "-", "-", unparsable, empty]
            rows.append(unscored)
        for score in system.scores:
            rows.append(
                [
                    system.name,
                    system.mode,
                    score.metric,
                    format_score(score.value),
                    format_marked_interval(score),
                    "-" if score.stderr is None else f"{score.stderr:.2f}",
                    unparsable,
                    empty,
                ]
            )
    return rows


def clean_rows(task: TaskResult) -> list[list[str]]:
    """Returns a row under CLEAN_HEADER for each model and metric, without and with a corpus' examples."""
    if task.contamination is None:
        return []

    all_scores: dict[tuple[str, str, str], MetricScore] = {}
    for system in task.systems:
        for score in system.scores:
            all_scores[system.name, system.mode, score.metric] = score

    rows = []
    for clean in task.contamination.clean_scores:
        for score in clean.scores:
            on_all = all_scores[clean.name, clean.mode, score.metric]
            rows.append(
                [
                    clean.name,
                    clean.mode,
                    score.metric,
                    format_score(on_all.value),
                    format_score(score.value),
                    format_interval(score.low, score.high),
                ]
            )
    return rows


def router_rows(task: TaskResult) -> list[list[str]]:
    """Returns a row under ROUTER_HEADER for each system and stack with routers."""
    rows = []
    for system in task.systems:
        for stack, summary in (system.router or {}).items():
            rows.append(
                [
                    system.name,
                    system.mode,
                    stack,
                    _format_finite(100 * summary.fraction_dropped, ".2f", " %"),
                    _format_finite(summary.load_cv, ".2f"),
                    _format_finite(summary.max_over_mean, ".2f", "×"),
                    _format_finite(summary.dead_experts, "g"),
                ]
            )
    return rows


def cost_rows(report: Report, task: TaskResult) -> list[list[str]]:
    """Returns a row under COST_HEADER for each system that is a model."""
    rows = []
    for system in task.systems:
        cost = system.cost
        if cost is None:
            continue
        speed = report.speed(task.task, system)
        rows.append(
            [
                system.name,
                system.mode,
                f"{cost.input_tokens:.1f}",
                f"{cost.output_tokens:.1f}",
                "-" if cost.flops is None else f"{cost.flops:.3g}",
                "-" if speed is None else f"{speed:,.0f}",
            ]
        )
    return rows


def calibration_rows(task: TaskResult) -> list[list[str]]:
    """Returns a row under CALIBRATION_HEADER for each system that ranked its choices."""
    rows = []
    for system in task.systems:
        if system.calibration is not None:
            rows.append(
                [
                    system.name,
                    system.mode,
                    f"{system.calibration.ece:.1f}",
                    f"{system.calibration.brier:.3f}",
                    f"{system.calibration.num_examples:,}",
                ]
            )
    return rows


def class_rows(task: TaskResult) -> list[list[str]]:
    """Returns a row under CLASS_HEADER for each class."""
    rows = []
    for count in task.by_class:
        rows.append([count.target, f"{count.right:,}", f"{count.total:,}", f"{count.answered:,}"])
    return rows


def _format_finite(value: float, form: str, unit: str = "") -> str:
    return f"{value:{form}}{unit}" if math.isfinite(value) else "-"
