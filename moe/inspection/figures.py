"""Figures of pages as SVG: the load, experts by kind of text, scores with intervals, curves.

Other modules compute the numbers; this one only draws them.
"""

import io
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from moe.estimates import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind people can distinguish.
BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
PINK = "#CC79A7"
GREY = "#666666"
COLOURS = (BLUE, ORANGE, GREEN, PINK, "#56B4E9", "#E69F00", GREY)
"""In the order in which lines of a figure use them."""

INK = "#010203"
"""Placeholder for the text color of the page, so that a figure follows light and dark mode."""

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "text.parse_math": False,  # names and units are no formulas
    "svg.fonttype": "none",
    "svg.hashsalt": "moe",
    "font.family": "sans-serif",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def figure_svg(figure: "Figure") -> str:
    """Returns the figure as an <svg> element, without background and with text in the page's colour."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    file = io.StringIO()
    with rc_context(STYLE):
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")


_WIDTH = 7.8  # inches
_NARROW_WIDTH = 4.6  # readable on a phone
_ROW_HEIGHT = 0.27
_CURVE_HEIGHT = 2.6
_FRAME_HEIGHT = 0.9  # of the title and the axis of a panel
_LABELLED_COLUMNS = 20
_MARKED_POINTS = 20
_STEPS_OF_COLOUR = 21
_FAINT = 0.01  # share of an expert's tokens below which a cell has no colour
_DEEP = 0.55  # of the way to either end of the colours, from which text is white
_MARKERS = ("o", "s", "D", "^", "v", "P", "X")


def draw_load(names: Sequence[str], shares: Sequence[Sequence[float]]) -> str:
    """Returns a heat map of the load over the uniform load: a row for each layer, a column for each expert.

    The colours are the same in every figure: white is uniform, the deepest are half or less and 1.5
    times or more.

    Args:
        names: Names of the layers.
        shares: For each layer, each expert's share of the requested slots.
    """
    from matplotlib import colormaps, rc_context
    from matplotlib.figure import Figure

    # A layer of fewer experts leaves the other columns empty.
    num_experts = max(map(len, shares))
    over_uniform = np.full((len(shares), num_experts), np.nan)
    for row, of_layer in enumerate(shares):
        over_uniform[row, : len(of_layer)] = np.array(of_layer) * len(of_layer)

    with rc_context(STYLE):
        size = (_WIDTH, _ROW_HEIGHT * 2 * len(names) + _FRAME_HEIGHT + 0.5)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        axes.grid(visible=False)
        axes.set_facecolor("#eeeeee")
        scale = colormaps["RdBu_r"].resampled(_STEPS_OF_COLOUR)
        mesh = axes.pcolormesh(over_uniform, cmap=scale, vmin=0.5, vmax=1.5)
        axes.set_xlabel("expert")

        # The first row is at the top; of many columns only some are named.
        axes.invert_yaxis()
        axes.set_yticks([row + 0.5 for row in range(len(names))], names, fontsize=8)
        named = range(0, num_experts, math.ceil(num_experts / _LABELLED_COLUMNS))
        ticks = [column + 0.5 for column in named]
        axes.set_xticks(ticks, [str(column + 1) for column in named], fontsize=8)

        # Text is white on a deep colour.
        for row, of_layer in enumerate(shares if num_experts <= _LABELLED_COLUMNS else ()):
            for column, share in enumerate(of_layer):
                value = over_uniform[row, column]
                axes.text(
                    column + 0.5,
                    row + 0.5,
                    f"{value:.2f}×\n{100 * share:.1f} %",
                    ha="center",
                    va="center",
                    color="white" if abs(value - 1) > 0.5 * _DEEP else "black",
                    fontsize=7,
                )

        label = "load over uniform load"
        if all(len(of_layer) == num_experts for of_layer in shares):
            label += f" (1× = {100 / num_experts:.1f} % of all requests)"
        style = {"orientation": "horizontal", "extend": "both", "aspect": 60, "pad": 0.02}
        figure.colorbar(mesh, ax=axes, label=label, **style)
    return figure_svg(figure)


# ---------------------------------------------------------------------------
# Experts by kind of text

_CELL = (8.0, 13.0)  # width and height, in the units of the figure
_LETTER = 5.4  # width of a letter of a name
_GROUP_GAP = 4.0


def draw_experts_by_domain(
    shares: Sequence[Sequence[float]], names: Sequence[str], groups: Sequence[str] = ()
) -> str:
    """Returns kinds of text by experts: a cell is the share of an expert's tokens that are of a kind.

    Experts are ordered by the kind that most of their tokens have, so that blocks show. The figure
    is narrow enough for a phone, and colours follow light and dark mode.

    Args:
        shares: For each of the E experts, L shares with the sum 1; all 0 for one without tokens.
        names: Names of the L kinds of text, e.g. languages, the upper one first.
        groups: Group of each, e.g. its family; neighbours in a group are drawn together.
    """
    width, height = _CELL
    groups = groups or [""] * len(names)
    left = _LETTER * max(map(len, names)) + 8
    right = _LETTER * max(map(len, groups)) + 8
    preferred = [row.index(max(row)) for row in map(list, shares)]
    order = sorted(range(len(shares)), key=lambda e: (preferred[e], -max(shares[e])))
    cells_end = left + width * len(shares)

    parts = []
    y = 0.0
    group_start = 0.0
    for number, (name, group) in enumerate(zip(names, groups, strict=True)):
        middle = y + 0.75 * height
        parts.append(
            f'<text x="{left - 5:.1f}" y="{middle:.1f}" text-anchor="end">{escape(name)}</text>'
        )
        for column, expert in enumerate(order):
            share = shares[expert][number]
            colour = f'fill="{ORANGE}" fill-opacity="{share**0.7:.2f}"'
            if share < _FAINT:
                colour = 'fill="currentColor" fill-opacity="0.06"'
            tip = f"<title>expert {expert + 1}: {100 * share:.0f} % {escape(name)}</title>"
            x = left + width * column
            size = f'width="{width - 0.8:.1f}" height="{height - 0.8:.1f}"'
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} {colour}>{tip}</rect>')
        y += height

        # The name of a group is beside the middle of its rows.
        if number + 1 == len(names) or groups[number + 1] != group:
            middle = (group_start + y) / 2 + 3
            label = f'<text x="{cells_end + 5:.1f}" y="{middle:.1f}" class="soft">{escape(group)}</text>'
            parts.append(label)
            y += _GROUP_GAP
            group_start = y

    for column, expert in enumerate(order):
        x = left + width * (column + 0.72)
        place = f'transform="translate({x:.1f} {y + 2:.1f}) rotate(-90)" text-anchor="end"'
        parts.append(f'<text {place} font-size="7.5">{expert + 1}</text>')
    box = f"0 0 {cells_end + right:.0f} {y + 16:.0f}"
    style = 'font-family="sans-serif" font-size="10.5" fill="currentColor"'
    label = 'role="img" aria-label="Experts by kind of text"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" {style} {label}>'
    return "\n".join([svg, *parts, "</svg>"])


# ---------------------------------------------------------------------------
# Scores and curves


def draw_scores(scores: Mapping[str, Estimate], *, title: str, label: str) -> str:
    """Returns bars from 0 with intervals, narrow enough for a phone.

    Args:
        scores: Estimates by name, the upper one first; ends that are not finite are not drawn.
        title: Title of the figure.
        label: Label of the values, with their unit.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ends = np.array(list(scores.values()))  # [R, 3]: value, low, high
    values = ends[:, 0]
    whiskers = np.abs(ends[:, 1:] - values[:, None])  # [R, 2]
    whiskers[~np.isfinite(whiskers)] = 0
    rows = range(len(scores))
    with rc_context(STYLE):
        size = (_NARROW_WIDTH, _ROW_HEIGHT * len(scores) + _FRAME_HEIGHT + 0.3)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        axes.grid(visible=False, axis="y")
        axes.set_yticks(rows, list(scores), fontsize=8)
        axes.set_ylim(len(scores) - 0.4, -0.6)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.barh(rows, values, 0.72, color=BLUE, alpha=0.55)
        style = {"fmt": "o", "color": BLUE, "markersize": 4, "capsize": 2.5, "linewidth": 1.3}
        axes.errorbar(values, rows, xerr=whiskers.T, **style)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(label)
    return figure_svg(figure)


Curve = tuple[str, Sequence[float], Sequence[float]]
"""Name, x and y of a line."""


def draw_curves(panels: Mapping[str, Sequence[Curve]], *, y_label: str, from_zero: bool) -> str:
    """Returns curves over training steps, two panels in a row, with one legend for all.

    Args:
        panels: The curves by title of the panel.
        y_label: Label of the vertical axis, with its unit.
        from_zero: Whether the vertical axis starts at 0.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    per_row = min(2, len(panels))
    num_rows = math.ceil(len(panels) / per_row)
    lines = {}
    with rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, num_rows * _CURVE_HEIGHT), layout="constrained")
        places = list(figure.subplots(num_rows, per_row, squeeze=False).flat)
        for axes, (title, curves) in zip(places, panels.items(), strict=False):
            for number, (name, x, y) in enumerate(curves):
                style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "markersize": 4}
                if len(x) <= _MARKED_POINTS:
                    style["marker"] = _MARKERS[number % len(_MARKERS)]
                (lines[name],) = axes.plot(x, y, label=name, **style)
            axes.set_title(title, fontsize=10)
            axes.set_xlabel("training step")
            axes.set_ylabel(y_label)
            if from_zero:
                axes.set_ylim(bottom=0)

        for axes in places[len(panels) :]:
            figure.delaxes(axes)
        place = "outside lower center"
        figure.legend(list(lines.values()), list(lines), loc=place, ncols=4, fontsize=8)
    return figure_svg(figure)
