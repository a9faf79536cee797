"""Intervals with their mark, long texts and Markdown tables; `moe.inspection.formatting` has the
scores.
"""

from collections.abc import Sequence

from moe.inspection.formatting import format_interval
from stmoe_eval.reports.records import AverageScore, MetricScore

NOTED = "*"
"""Stands at an interval that has a note, as that no spread was seen."""


def format_marked_interval(score: MetricScore | AverageScore) -> str:
    """Returns e.g. `93.6 to 100.0 *`: the interval of a score, marked if it has a note."""
    interval = format_interval(score.low, score.high)
    return f"{interval} {NOTED}" if score.note else interval


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table; the text of a cell comes on one line."""
    lines = [header, ["---"] * len(header)]
    for row in rows:
        lines.append([" ".join(text.split()).replace("|", "\\|") for text in row])
    return [f"| {' | '.join(line)} |" for line in lines]


def shorten(text: str, length: int) -> str:
    """Returns at most about `length` characters: two thirds of them from the start of the text, the
    others from its end.
    """
    if len(text) <= length:
        return text
    head = 2 * length // 3
    return f"{text[:head]} [... {len(text) - length:,} characters ...] {text[head - length :]}"
