"""What a report says, as blocks of sentences and tables; report.md and report.html are made of them."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from moe.inspection.formatting import format_interval, format_score, format_versions
from moe.inspection.html_page import render_page
from stmoe_eval.answers.cost import FLOPS_FORMULA
from stmoe_eval.answers.predict import MODES
from stmoe_eval.reports.formatting import format_marked_interval, markdown_table, shorten
from stmoe_eval.reports.records import Contamination, ModelInfo, Report, SystemResult, TaskResult
from stmoe_eval.reports.scoreboard import (
    NOT_SCORED,
    board_chart,
    board_legend,
    board_lines,
    board_table,
)

_TEMPLATES = Path(__file__).parent / "templates"
_SHOWN_CHARACTERS = 400

_CALIBRATION = (
    "ECE, the expected calibration error, is the mean distance between confidence and accuracy over 15 "
    "bins of confidence. The Brier score lies between 0 and 2. Lower is better for both."
)
_ROUTERS = (
    "A dropped token reaches no expert. Load CV is the standard deviation of the load divided by its "
    "mean. An expert is dead if no token requests it, neither as first nor as later choice."
)


class Block(NamedTuple):
    """A part of a report; what is empty is left out.

    Attributes:
        title: Heading.
        sentences: One is a paragraph, several are a list.
        header: Header of a table.
        rows: Its rows.
        numbers: First of the columns that hold numbers.
        texts: Columns that hold long texts.
        level: 2 for the heading of a task, 3 for one within it.
        warns: Whether the sentences are about a failure, or what is not comparable.
        svg: A figure, which Markdown leaves out.
    """

    title: str = ""
    sentences: Sequence[str] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    numbers: int = 99
    texts: Sequence[int] = ()
    level: int = 3
    warns: bool = False
    svg: str = ""


def markdown_report(report: Report) -> str:
    """Returns report.md."""
    lines = ["# Evaluation", ""]
    for block in report_blocks(report):
        if block.title:
            lines += [f"{'#' * block.level} {block.title}", ""]
        bullet = "- " if len(block.sentences) > 1 else ""
        lines += [bullet + " ".join(sentence.split()) for sentence in block.sentences]
        if block.sentences:
            lines.append("")
        if block.rows:
            lines += [*markdown_table(block.header, block.rows), ""]
    return "\n".join(lines)


def html_report(report: Report) -> str:
    """Returns report.html."""
    blocks = report_blocks(report)
    return render_page("evaluation.html", _TEMPLATES, title="Evaluation", blocks=blocks)


def report_blocks(report: Report) -> list[Block]:
    """Returns the failures, the settings, all scores, and the results of each task."""
    lines = board_lines(report)
    failures = [f"{failure.task} failed: {failure.message}" for failure in report.failed]
    settings = [f"Made by `{report.command}`"]
    settings += [f"`{name}`: {model_sentence(model)}" for name, model in report.models.items()]
    settings += [format_versions(report.versions), f"device: {report.device}"]

    blocks = [Block(sentences=failures, warns=True), Block(sentences=settings)]
    if lines:
        sentence = "Scores in percent; in brackets, 95 % intervals over groups of examples."
        blocks.append(Block("Scores", [sentence], *board_table(lines), numbers=3, level=2))
        blocks.append(Block(sentences=board_legend(lines), svg=board_chart(lines)))
    for task in report.tasks:
        blocks += _task_blocks(report, task)
    return blocks


def _task_blocks(report: Report, task: TaskResult) -> list[Block]:
    """Returns the results of one task."""
    description = [task.description, _data_sentence(task)]
    blocks = [Block(f"{task.task} (version {task.version})", description, level=2)]
    blocks += [Block(sentences=task.notes, warns=True), _score_block(task)]
    blocks.append(Block(sentences=_remarks(task)))
    if task.contamination:
        blocks.append(_contamination_block(task, task.contamination))

    costs = cost_rows(report, task)
    if costs:
        header = ["system", "mode", "input tokens", "output tokens", "FLOPs per example"]
        blocks.append(Block("Cost", [FLOPS_FORMULA], [*header, "tokens/s"], costs, numbers=2))

    calibrations = []
    routers = []
    for system in task.systems:
        names = [system.name, system.mode]
        if system.calibration:
            ece, brier, num_examples, _ = vars(system.calibration).values()
            calibrations.append([*names, f"{ece:.1f}", f"{brier:.3f}", f"{num_examples:,}"])
        for stack, summary in (system.router or {}).items():
            dropped, cv, largest, dead, _ = summary
            dropped = None if dropped is None else 100 * dropped
            cells = [
                _finite(dropped, ".2f", " %"),
                _finite(cv, ".2f"),
                _finite(largest, ".2f", "×"),
            ]
            routers.append([*names, stack, *cells, _finite(dead, "g")])
    if calibrations:
        header = ["system", "mode", "ECE (points)", "Brier score", "examples"]
        title = "Calibration of ranked choices"
        blocks.append(Block(title, [_CALIBRATION], header, calibrations, numbers=2))
    if routers:
        header = ["system", "mode", "stack", "dropped", "load CV", "max / mean", "dead experts"]
        blocks.append(Block("Routers", [_ROUTERS], header, routers, numbers=3))

    lengths = task.inputs
    blocks.append(
        Block(
            "Lengths of inputs",
            [
                f"Tokens of `{task.systems[0].name}` per input: mean {lengths.mean:.1f}, median "
                f"{lengths.median:.0f}, maximum {lengths.longest:,}. {lengths.num_cut:,} inputs were "
                f"cut to {lengths.limit:,} tokens."
            ],
        )
    )
    first = f"{task.systems[0].name} by {task.systems[0].mode}"
    if task.by_class:
        header = ["target", "right", "examples", "answered"]
        rows = [
            [one.target, *(f"{n:,}" for n in (one.right, one.total, one.answered))]
            for one in task.by_class
        ]
        blocks.append(Block(f"By class ({first})", (), header, rows, numbers=1))
    if task.worst:
        header = ["id", "inputs", "target", "output", "score"]
        rows = []
        for answer in task.worst:
            texts = (answer.id, answer.inputs, answer.target, answer.output)
            cells = [shorten(text, _SHOWN_CHARACTERS) for text in texts]
            rows.append([*cells, format_score(answer.score)])
        blocks.append(
            Block(f"Worst answers ({first})", (), header, rows, numbers=4, texts=(1, 2, 3))
        )
    return blocks


# ---------------------------------------------------------------------------
# Sentences


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


def _data_sentence(task: TaskResult) -> str:
    """Returns the origin and the number of a task's examples."""
    origin = task.data.origin
    if task.data.folder:
        origin = task.data.folder
    elif task.data.repository:
        origin = f"{task.data.repository} ({task.data.config}, {task.data.revision})"
    expected = "" if task.num_expected is None else f" of {task.num_expected:,} expected"
    return (
        f"Data: {origin}, licence {task.licence}. The {task.split} split has {task.num_rows:,}"
        f"{expected} rows: {task.num_examples:,} examples in {task.num_groups:,} groups. "
        f"Prompt: {task.prompt_source}."
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


def signature_sentences(task: TaskResult) -> list[str]:
    """Returns the library, version and settings that computed the metrics."""
    return [f"{metric}: {signature}." for metric, signature in task.signatures.items()]


def _remarks(task: TaskResult) -> list[str]:
    """Returns settings of metrics, notes on single scores, and how systems compare."""
    sentences = signature_sentences(task)
    fitted: dict[str, list[str]] = {}
    for system in task.systems:
        for score in system.scores:
            if score.note:
                name = f"{system.name} by {system.mode}, {score.metric}"
                sentences.append(f"{name}: {score.note}.")
        if system.fitted_to is not None:
            fitted.setdefault(system.fitted_to, []).append(system.name)
    sentences += model_comparisons(task.systems)
    return [
        *sentences,
        *(f"{', '.join(names)}: fitted to {data}." for data, names in fitted.items()),
    ]


def model_comparisons(systems: Sequence[SystemResult]) -> list[str]:
    """Returns a sentence for each further model: how far it is from the first in the same mode, and
    whether their intervals overlap.
    """
    sentences = []
    for mode in MODES:
        of_mode = [system for system in systems if system.mode == mode and system.scores]
        for other in of_mode[1:]:
            ours, theirs = of_mode[0].scores[0], other.scores[0]
            if ours.value is None or ours.low is None or ours.high is None:
                continue
            if theirs.value is None or theirs.low is None or theirs.high is None:
                continue

            relation = "do not overlap"
            if ours.low <= theirs.high and theirs.low <= ours.high:
                relation = "overlap; `stmoe eval compare` tests the difference"
            gap = ours.value - theirs.value
            sentences.append(
                f"{mode}: `{of_mode[0].name}` is {abs(gap):.1f} points {'below' if gap < 0 else 'above'} "
                f"`{other.name}`; their 95 % intervals {relation}."
            )
    return sentences


# ---------------------------------------------------------------------------
# Tables


def _score_block(task: TaskResult) -> Block:
    """Returns every metric of every system."""
    rows = []
    for system in task.systems:
        unparsable = "-" if system.num_unparsable is None else f"{system.num_unparsable:,}"
        counts = [unparsable, f"{system.num_empty:,}"]
        if not system.scores:
            rows.append([system.name, system.mode, NOT_SCORED, "-", "-", "-", *counts])
        for score in system.scores:
            stderr = "-" if score.stderr is None else f"{score.stderr:.2f}"
            cells = [format_score(score.value), format_marked_interval(score), stderr]
            rows.append([system.name, system.mode, score.metric, *cells, *counts])
    header = ["system", "mode", "metric", "score (%)", "95 % interval (%)"]
    header += ["standard error (points)", "unparsable", "empty"]
    return Block(header=header, rows=rows, numbers=3)


def _contamination_block(task: TaskResult, contamination: Contamination) -> Block:
    """Returns the scores of each model with and without the examples of a corpus."""
    all_scores: dict[tuple[str, str, str], float | None] = {}
    for system in task.systems:
        for score in system.scores:
            all_scores[system.name, system.mode, score.metric] = score.value

    rows = []
    for clean in contamination.clean_scores:
        for score in clean.scores:
            names = (clean.name, clean.mode, score.metric)
            cells = [format_score(all_scores[names]), format_score(score.value)]
            rows.append([*names, *cells, format_interval(score.low, score.high)])
    header = ["system", "mode", "metric", "all examples (%)", "clean examples (%)"]
    sentences = [contamination_sentence(contamination)]
    return Block(
        "Overlap with a corpus", sentences, [*header, "95 % interval (%)"], rows, numbers=3
    )


def cost_rows(report: Report, task: TaskResult) -> list[list[str]]:
    """Returns name, mode, tokens, FLOPs and speed of each system that is a model."""
    rows = []
    for system in task.systems:
        cost = system.cost
        if cost is not None:
            speed = report.speed(task.task, system)
            tokens = [f"{cost.input_tokens:.1f}", f"{cost.output_tokens:.1f}"]
            flops = "-" if cost.flops is None else f"{cost.flops:.3g}"
            tokens_per_second = "-" if speed is None else f"{speed:,.0f}"
            rows.append([system.name, system.mode, *tokens, flops, tokens_per_second])
    return rows


def _finite(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:{form}}{unit}"
