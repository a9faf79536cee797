"""Intervals with their mark, long texts, Markdown tables and lists; `moe.inspection.formatting` has the
scores.
"""

from collections.abc import Sequence

from moe.inspection.formatting import format_interval
from stmoe_eval.reports.records import AverageScore, MetricScore

SHOWN_CHARACTERS = 300

NOTED = "*"
"""Stands at an interval that has a note, as that no spread was seen."""


def format_marked_interval(score: MetricScore | AverageScore) -> str:
    """Returns e.g. `93.6 to 100.0 *`: the interval of a score, marked if it has a note."""
    interval = format_interval(score.low, score.high)
    return f"{interval} {NOTED}" if score.note else interval


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table."""
    lines = [header, ["---"] * len(header)]
    for row in rows:
        lines.append([text.replace("|", "\\|") for text in row])
    return [f"| {' | '.join(line)} |" for line in lines]


def markdown_list(sentences: Sequence[str]) -> list[str]:
    """Returns the lines of a list."""
    return [f"- {sentence}" for sentence in sentences]


def markdown_cell(text: str, length: int = SHOWN_CHARACTERS) -> str:
    """Returns a text for a cell of a table: on one line, shortened."""
    return " ".join(shorten(text, length).split())


def shorten(text: str, length: int) -> str:
    """Returns at most about `length` characters: two thirds of them from the start of the text, the
    others from its end.
    """
    if len(text) <= length:
        return text
    head = 2 * length // 3
    return f"{text[:head]} [... {len(text) - length:,} characters ...] {text[head - length :]}"
