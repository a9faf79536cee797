"""Markdown of reports: tables, numbers, and long texts cut short."""

from collections.abc import Sequence

SHOWN_CHARACTERS = 300


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table."""
    lines = [
        header,
        ["---"] * len(header),
        *([text.replace("|", "\\|") for text in row] for row in rows),
    ]
    return [f"| {' | '.join(line)} |" for line in lines]


def cell(text: str, length: int = SHOWN_CHARACTERS) -> str:
    """Returns a text as a table takes it: on one line, cut short, its beginning and end kept."""
    return " ".join(shorten(text, length).split())


def shorten(text: str, length: int) -> str:
    """Returns at most about `length` characters: two thirds of them from the start, the others from
    the end.
    """
    if len(text) <= length:
        return text
    head = 2 * length // 3
    return f"{text[:head]} [... {len(text) - length:,} characters ...] {text[head - length :]}"


def number(value: float | None, *, sign: bool = False) -> str:
    """Returns a score with one decimal; `-` where there is none."""
    return "-" if value is None else f"{value:+.1f}" if sign else f"{value:.1f}"


def interval(low: float | None, high: float | None) -> str:
    """Returns e.g. `76.3 to 84.3`; `-` where there is none."""
    return "-" if low is None or high is None else f"{low:.1f} to {high:.1f}"
