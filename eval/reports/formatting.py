"""Scores, intervals, long texts and Markdown tables as text."""

from collections.abc import Sequence

SHOWN_CHARACTERS = 300


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table."""
    lines = [header, ["---"] * len(header)]
    for row in rows:
        lines.append([text.replace("|", "\\|") for text in row])
    return [f"| {' | '.join(line)} |" for line in lines]


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


def format_score(value: float | None, *, sign: bool = False) -> str:
    """Returns a score with one decimal; `-` where there is none."""
    if value is None:
        return "-"
    return f"{value:+.1f}" if sign else f"{value:.1f}"


def format_interval(low: float | None, high: float | None) -> str:
    """Returns e.g. `76.3 to 84.3`; `-` where there is none."""
    if low is None or high is None:
        return "-"
    return f"{low:.1f} to {high:.1f}"
