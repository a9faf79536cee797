"""All scores of a report and the published ones in one table, with its legend and its chart."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from moe.inspection.formatting import format_score
from stmoe_eval.answers.predict import MODES
from stmoe_eval.reports.formatting import NOTED, format_marked_interval
from stmoe_eval.reports.published import SYSTEMS, published_scores
from stmoe_eval.reports.records import AverageScore, MetricScore, PublishedScore, Report, TaskResult
from stmoe_eval.scores.superglue import SUPERGLUE

NOT_SCORED = "not scored"

_DIFFERENT_SPLIT = "†"
_OWN_PROMPT = "‡"
_PARTIAL_DATA = "§"
_PRINTED_NAMES = {"acc": "accuracy", "avg": "average", "R-2": "rouge2"}
"""Our names for metrics that papers print in other words."""

# The chart: names on the left, values to the right of the bars and their intervals.
_WIDTH = 640
_LEFT = 230
_RIGHT = 60
_BAR = 21
_NAME_CHARACTERS = 34


class Line(NamedTuple):
    """One metric of one task.

    Attributes:
        task: Name of the task.
        metric: Name of the metric.
        split: The evaluated split.
        marks: Marks of the legend that apply to all our scores.
        scores: Scores of our systems and of the baselines, by name and mode.
        published: Published results, by system.
        in_chart: Whether the chart shows it: one metric of each task.
    """

    task: str
    metric: str
    split: str
    marks: str
    scores: Mapping[tuple[str, str], MetricScore | AverageScore]
    published: Mapping[str, PublishedScore]
    in_chart: bool

    def published_text(self, system: str) -> str:
        """Returns a published result, marked if it is of another split; empty for none."""
        result = self.published.get(system)
        if result is None:
            return ""
        return format_score(result.value) + ("" if result.split == self.split else _DIFFERENT_SPLIT)


def board_lines(report: Report) -> list[Line]:
    """Returns a line for each metric of each task; the average comes first."""
    lines = []
    if report.averages:
        parts = [task for task in report.tasks if task.task in SUPERGLUE]
        lines.append(
            Line(
                task="superglue",
                metric="average",
                split="/".join(dict.fromkeys(task.split for task in parts)),
                marks="".join(dict.fromkeys("".join(map(_marks, parts)))),
                scores={(score.name, score.mode): score for score in report.averages},
                # If a system has two published averages, the last is shown.
                published={one.system: one for one in published_scores("superglue", "average")},
                in_chart=True,
            )
        )

    for task in report.tasks:
        if task.num_hidden:
            lines.append(Line(task.task, NOT_SCORED, task.split, "", {}, {}, in_chart=False))
            continue

        # The chart shows the first metric that has published results, or else the first.
        metrics = [score.metric for score in task.systems[0].scores]
        with_results = {result.own_metric for result in task.published}
        shown = [metric for metric in metrics if metric in with_results] or metrics
        for metric in metrics:
            scores = {}
            for system in task.systems:
                for score in system.scores:
                    if score.metric == metric:
                        scores[system.name, system.mode] = score
            published = {one.system: one for one in task.published if one.own_metric == metric}
            in_chart = metric == shown[0]
            marks = _marks(task)
            lines.append(Line(task.task, metric, task.split, marks, scores, published, in_chart))
    return lines


def _marks(task: TaskResult) -> str:
    """Returns the marks for the reasons why our scores of a task are not comparable."""
    other_rows = task.num_expected not in (None, task.num_rows)
    marks = ""
    if task.data.folder or task.limit is not None or other_rows:
        marks += _PARTIAL_DATA
    if task.prompt_source != "T5" and task.published:
        marks += _OWN_PROMPT
    return marks


def board_table(lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """Returns the header and the rows: models that answered, then the published systems."""
    ours = [key for key in dict.fromkeys(key for line in lines for key in line.scores)]
    ours = [key for key in ours if key[1] in MODES]
    published = [name for name in SYSTEMS if any(name in line.published for line in lines)]
    header = ["task", "metric", "split", *map(", ".join, ours), *published]

    rows = []
    for line in lines:
        row = [line.task + line.marks, line.metric, line.split]
        for key in ours:
            score = line.scores.get(key)
            cell = ""
            if score is not None:
                cell = f"{format_score(score.value)} ({format_marked_interval(score)})"
            row.append(cell)
        rows.append([*row, *map(line.published_text, published)])
    return header, rows


def board_legend(lines: Sequence[Line]) -> list[str]:
    """Returns a sentence for each mark in use, and the sources of published results."""
    marks = "".join(line.marks for line in lines)
    results = [(line, result) for line in lines for result in line.published.values()]
    has_notes = any(score.note for line in lines for score in line.scores.values())
    other_names = set()
    for line, result in results:
        if _PRINTED_NAMES.get(result.metric, result.metric.lower()) != line.metric:
            other_names.add(f"{result.metric} of {line.task} is our {line.metric}")

    meanings = {
        f"{NOT_SCORED}: the labels of the split are hidden; see where its predictions are below.": any(
            line.metric == NOT_SCORED for line in lines
        ),
        f"{NOTED} the interval has a note, below the scores of the task.": has_notes,
        f"{_PARTIAL_DATA} ours are of rows of a folder, or of part of a split: not comparable with published scores.": (
            _PARTIAL_DATA in marks
        ),
        f"{_OWN_PROMPT} the prompt is not T5's; published results may stand on another one.": (
            _OWN_PROMPT in marks
        ),
        f"{_DIFFERENT_SPLIT} published on another split than ours: the test split, or validation for a test.": any(
            result.split != line.split for line, result in results
        ),
        "The validation split of natural_questions is what others call its test set.": any(
            (line.task, line.split) == ("natural_questions", "validation") for line in lines
        ),
    }
    sentences = [sentence for sentence, applies in meanings.items() if applies]
    if results:
        sources = sorted({result.source for _, result in results})
        sentences.append(
            f"Published: {'; '.join(sources)}. They are of models that were fine-tuned on the task."
        )
    if other_names:
        sentences.append(
            f"Metrics under other names in the papers: {'; '.join(sorted(other_names))}."
        )
    return sentences


def board_chart(lines: Sequence[Line]) -> str:
    """Returns an <svg> element with a bar for each system; whiskers are 95 % intervals.

    Models have the page's first colour. The scale begins at 0, or at the lowest end below it.
    """
    bars: list[tuple[str, str, float, float, float]] = []  # style, name, value, low, high
    for line in lines:
        if not line.in_chart:
            continue
        bars.append(("title", f"{line.task} {line.metric}{line.marks} (%)", 0.0, 0.0, 0.0))
        for (name, mode), score in line.scores.items():
            if score.value is not None:
                low = score.value if score.low is None else score.low
                high = score.value if score.high is None else score.high
                style = "ours" if mode in MODES else "theirs"
                bars.append((style, f"{name}, {mode}", score.value, low, high))
        for system, result in line.published.items():
            bars.append(("theirs", system, result.value, result.value, result.value))

    least = min((bar[3] for bar in bars), default=0.0)
    most = max((bar[4] for bar in bars), default=0.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(most - least, 1e-9)

    def x(value: float) -> float:
        return _LEFT + scale * (value - least)

    parts = []
    for number, (style, name, value, low, high) in enumerate(bars):
        top = _BAR * number
        if style == "title":
            parts.append(f'<text y="{top + 15}" style="font-weight: 600">{escape(name)}</text>')
            continue
        left, right = sorted((x(0.0), x(value)))
        short = name if len(name) <= _NAME_CHARACTERS else f"{name[:18]}…{name[-15:]}"
        parts.append(
            f'<text x="{_LEFT - 8}" y="{top + 13}" text-anchor="end">{escape(short)}</text>'
            f'<rect class="{style}" x="{left:.1f}" y="{top + 2}" width="{right - left:.1f}" height="14"/>'
            f'<path class="whisker" d="M{x(low):.1f} {top + 9}H{x(high):.1f}"/>'
            f'<text x="{max(right, x(high)) + 6:.1f}" y="{top + 13}">{format_score(value)}</text>'
        )
    box = f"0 0 {_WIDTH} {_BAR * len(bars) + 4}"
    return f'<svg viewBox="{box}" role="img" aria-label="Scores">{"".join(parts)}</svg>'
