"""Long texts and Markdown tables; scores are formatted by `moe.inspection.formatting`."""

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
