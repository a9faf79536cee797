"""The figure of the report, experts by kind of text, as SVG; and the colours of all pages."""

from collections.abc import Sequence
from html import escape

# Okabe and Ito's colours, which colour-blind people can distinguish.
_ORANGE = "#D55E00"
COLOURS = ("#0072B2", _ORANGE, "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#666666", "#F0E442")

_CELL = (8.0, 13.0)  # width and height, in the units of the figure
_LETTER = 5.4  # width of a letter of a name
_GROUP_GAP = 4.0
_NUMBER_WIDTH = 18.0
_RIGHT = 'text-anchor="end"'
_FAINT = 0.01  # share of an expert's tokens below which a cell has no colour


def draw_experts_by_domain(
    shares: Sequence[Sequence[float]],
    names: Sequence[str],
    numbers: Sequence[int],
    groups: Sequence[str] = (),
) -> str:
    """Returns kinds of text by experts: a cell is the share of an expert's tokens that are of a kind.

    Experts are ordered by the kind that most of their tokens have, so that blocks show. The figure
    is narrow enough for a phone, and colours follow light and dark mode.

    Args:
        shares: For each of the E experts, L shares with the sum 1; all 0 for one without tokens.
        names: Names of the L kinds of text, e.g. languages, the upper one first.
        numbers: Number beside each, e.g. of the experts that carry most of its tokens.
        groups: Group of each, e.g. its family; neighbours in a group are drawn together.
    """
    width, height = _CELL
    groups = groups or [""] * len(names)
    left = _LETTER * max(map(len, names)) + 8
    right = _LETTER * max(map(len, groups)) + _NUMBER_WIDTH + 8
    preferred = [row.index(max(row)) for row in map(list, shares)]
    order = sorted(range(len(shares)), key=lambda e: (preferred[e], -max(shares[e])))
    cells_end = left + width * len(shares)
    groups_start = cells_end + _NUMBER_WIDTH + 5

    parts = []
    y = 0.0
    group_start = 0.0
    for number, (name, group) in enumerate(zip(names, groups, strict=True)):
        middle = y + 0.75 * height
        parts.append(_text(left - 5, middle, name, _RIGHT))
        parts.append(_text(groups_start - 7, middle, str(numbers[number]), _RIGHT))
        for column, expert in enumerate(order):
            share = shares[expert][number]
            colour = f'fill="{_ORANGE}" fill-opacity="{share**0.7:.2f}"'
            if share < _FAINT:
                colour = 'fill="currentColor" fill-opacity="0.06"'
            tip = f"<title>expert {expert + 1}: {100 * share:.0f} % {escape(name)}</title>"
            x = left + width * column
            size = f'width="{width - 0.8:.1f}" height="{height - 0.8:.1f}"'
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} {colour}>{tip}</rect>')
        y += height

        # The name of a group is beside the middle of its rows.
        if number + 1 == len(names) or groups[number + 1] != group:
            parts.append(_text(groups_start, (group_start + y) / 2 + 3, group, 'class="soft"'))
            y += _GROUP_GAP
            group_start = y

    for column, expert in enumerate(order):
        x = left + width * (column + 0.72)
        place = f'transform="translate({x:.1f} {y + 2:.1f}) rotate(-90)" {_RIGHT}'
        parts.append(f'<text {place} font-size="7.5">{expert + 1}</text>')
    box = f"0 0 {cells_end + right:.0f} {y + 16:.0f}"
    style = 'font-family="sans-serif" font-size="10.5" fill="currentColor"'
    label = 'role="img" aria-label="Experts by kind of text"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" {style} {label}>'
    return "\n".join([svg, *parts, "</svg>"])


def _text(x: float, y: float, content: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(content)}</text>'
