"""Figures as SVG: heat maps, estimates with intervals, curves; a panel for each layer.

They are embedded in pages, displayed by notebooks and saved as files. Other modules compute the
numbers; this one only draws them.
"""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from moe.checks import check
from moe.estimates import Estimate
from moe.files import output_path, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
_NARROW_WIDTH = 4.6
_ROW_HEIGHT = 0.27
_CURVE_HEIGHT = 2.6
_FRAME_HEIGHT = 0.9  # of the title and the axis of a panel
_MOST_COLUMNS = 10  # of two heat maps side by side
_LABELLED_COLUMNS = 20
_MARKED_POINTS = 20
_STEPS_OF_COLOUR = 21
_FAINT = 0.01  # share of an expert's tokens below which a cell has no colour
_DEEP = 0.55  # of the way to either end of the colours, from which text is white
_MARKERS = ("o", "s", "D", "^", "v", "P", "X")


@dataclass(frozen=True)
class Drawing:
    """A figure, which notebooks display.

    Attributes:
        svg: The whole figure, an <svg> element.
    """

    svg: str

    def save(self, path: Path | str) -> Path:
        """Writes the figure, whole or not at all, and returns where it is.

        Args:
            path: The .svg file; an existing one is replaced.

        Raises:
            ConfigError: When it is not the path of an .svg file, or is inside a finished folder.
        """
        file = output_path(path, suffix=".svg", option="path")
        write_text(file, self.svg)
        return file

    def _repr_svg_(self) -> str:
        return self.svg


# ---------------------------------------------------------------------------
# Heat maps


class HeatMap(NamedTuple):
    """A panel: rows by columns, coloured by value.

    Attributes:
        title: E.g. the name of a layer.
        rows: Names of the R rows, the upper one first.
        columns: Names of the C columns.
        values: R rows of C values; NaN is a cell without colour.
        texts: Texts of the cells; empty for none.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]
    texts: Sequence[Sequence[str]] = ()


def draw_heat_maps(
    panels: Sequence[HeatMap],
    *,
    label: str,
    x_label: str,
    limits: tuple[float, float],
    y_label: str = "",
    colours: str = "RdBu_r",
) -> Drawing:
    """Returns heat maps with one scale of colours.

    Args:
        panels: The heat maps.
        label: Label of the colour scale, with its unit.
        x_label: Label of the columns.
        limits: Values of the deepest colours at both ends; more extreme ones look the same.
        y_label: Label of the rows.
        colours: Name of a colour map of matplotlib.

    Raises:
        ConfigError: When there is no panel, or the limits are not two different numbers.
    """
    from matplotlib import rc_context

    check(bool(panels), "panels", list(panels), "at least one panel")
    low, high = limits
    check(low < high, "limits", limits, "two numbers, the smaller one first")

    # Narrow heat maps are drawn side by side; a row is as high as the text of its cells.
    most_columns = max(len(panel.columns) for panel in panels)
    most_rows = max(len(panel.rows) for panel in panels)
    most_lines = 1
    for panel in panels:
        for texts in panel.texts:
            most_lines = max(most_lines, *(text.count("\n") + 1 for text in texts))
    per_row = 2 if most_columns <= _MOST_COLUMNS and len(panels) > 1 else 1
    height = _ROW_HEIGHT * most_lines * most_rows + _FRAME_HEIGHT

    def draw(axes: "Axes", panel: HeatMap) -> None:
        _draw_heat_map(axes, panel, limits, colours)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)

    figure = _draw_panels(panels, per_row, height, draw, extra=0.5)

    # One scale of colours below all of them.
    with rc_context(STYLE):
        bar = figure.colorbar(
            figure.axes[0].collections[0],
            ax=figure.axes,
            orientation="horizontal",
            extend="both",
            aspect=60,
            pad=0.02,
        )
        bar.set_label(label)
    return Drawing(figure_svg(figure))


def draw_load(names: Sequence[str], shares: Sequence[Sequence[float]]) -> Drawing:
    """Returns a heat map of the load over the uniform load: a row for each layer, a column for each expert.

    The colours are the same in every figure: white is uniform, the deepest are half or less and 1.5
    times or more.

    Args:
        names: Names of the layers.
        shares: For each layer, each expert's share of the requested slots.
    """
    num_experts = max(map(len, shares))
    over_uniform = []
    texts = []
    for row in shares:
        # A layer of fewer experts leaves the other columns empty.
        num_missing = num_experts - len(row)
        row_over_uniform = [share * len(row) for share in row]
        over_uniform.append(row_over_uniform + [math.nan] * num_missing)
        row_texts = [f"{share * len(row):.2f}×\n{100 * share:.1f} %" for share in row]
        texts.append(row_texts + [""] * num_missing)

    experts = [str(expert + 1) for expert in range(num_experts)]
    label = "load over uniform load"
    if all(len(row) == num_experts for row in shares):
        label += f" (1× = {100 / num_experts:.1f} % of all requests)"
    panel = HeatMap("", names, experts, over_uniform, texts)
    return draw_heat_maps([panel], label=label, x_label="expert", limits=(0.5, 1.5))


def _draw_heat_map(axes: "Axes", panel: HeatMap, limits: tuple[float, float], colours: str) -> None:
    """Draws a heat map and the text of its cells."""
    from matplotlib import colormaps

    low, high = limits
    axes.grid(visible=False)
    axes.set_facecolor("#eeeeee")
    scale = colormaps[colours].resampled(_STEPS_OF_COLOUR)
    axes.pcolormesh(panel.values, cmap=scale, vmin=low, vmax=high)

    # The first row is at the top; of many columns only some are named.
    axes.invert_yaxis()
    axes.set_yticks([row + 0.5 for row in range(len(panel.rows))], panel.rows, fontsize=8)
    step = math.ceil(len(panel.columns) / _LABELLED_COLUMNS)
    named = range(0, len(panel.columns), step)
    ticks = [column + 0.5 for column in named]
    axes.set_xticks(ticks, [panel.columns[column] for column in named], fontsize=8)

    # Text is white on a deep colour.
    if len(panel.columns) > _LABELLED_COLUMNS:
        return
    middle = (low + high) / 2
    for row, texts in enumerate(panel.texts):
        for column, text in enumerate(texts):
            value = panel.values[row][column]
            depth = abs(value - middle) / (high - middle)
            is_deep = depth > _DEEP if colours == "RdBu_r" else value > middle
            axes.text(
                column + 0.5,
                row + 0.5,
                text,
                ha="center",
                va="center",
                color="white" if is_deep else "black",
                fontsize=7,
            )


# ---------------------------------------------------------------------------
# Experts by kind of text

_CELL = (8.0, 13.0)  # width and height, in the units of the figure
_LETTER = 5.4  # width of a letter of a name
_GROUP_GAP = 4.0


def draw_experts_by_domain(
    shares: Sequence[Sequence[float]], names: Sequence[str], groups: Sequence[str] = ()
) -> Drawing:
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
    return Drawing("\n".join([svg, *parts, "</svg>"]))


# ---------------------------------------------------------------------------
# Estimates with intervals


class Row(NamedTuple):
    """An estimate of a panel.

    Attributes:
        name: Label of its line; estimates with the same name share a line.
        series: Distinguishes estimates on one line; named in the legend.
        estimate: A value, and its interval; ends that are not finite are not drawn.
    """

    name: str
    series: str
    estimate: Estimate


class IntervalPanel(NamedTuple):
    """A panel of estimates.

    Attributes:
        title: E.g. the name of a layer.
        rows: The estimates, the upper one first.
        line: Value of a dashed line; None for none.
        line_label: Its name in the legend.
    """

    title: str
    rows: Sequence[Row]
    line: float | None = None
    line_label: str = ""


def draw_intervals(
    panels: Sequence[IntervalPanel], *, label: str, from_zero: bool = False, narrow: bool = False
) -> Drawing:
    """Returns estimates with their intervals.

    Args:
        panels: The estimates.
        label: Label of the values, with their unit.
        from_zero: Whether to draw bars that start at 0 instead of points.
        narrow: Whether the text stays readable on a phone, in a figure with one panel a row.

    Raises:
        ConfigError: When there is no panel, or one has no estimate.
    """
    check(bool(panels), "panels", list(panels), "at least one panel")
    most_rows = 0
    for panel in panels:
        check(bool(panel.rows), f"rows of {panel.title}", [], "at least one estimate")
        most_rows = max(most_rows, len({row.name for row in panel.rows}))

    # A series has the same colour in all panels.
    series: list[str] = []
    for panel in panels:
        for row in panel.rows:
            if row.series not in series:
                series.append(row.series)
    height = _ROW_HEIGHT * most_rows * max(1.0, 0.6 * len(series)) + _FRAME_HEIGHT

    def draw(axes: "Axes", panel: IntervalPanel) -> None:
        _draw_estimates(axes, panel, series, from_zero)
        axes.set_xlabel(label)

    per_row = 2 if len(panels) > 1 and not narrow else 1
    width = _NARROW_WIDTH if narrow else _WIDTH
    figure = _draw_panels(panels, per_row, height, draw, extra=0.3, width=width)

    # One scale, so that panels can be compared.
    lefts = [axes.get_xlim()[0] for axes in figure.axes]
    rights = [axes.get_xlim()[1] for axes in figure.axes]
    for axes in figure.axes:
        axes.set_xlim(min(lefts), max(rights))
    return Drawing(figure_svg(figure))


def _draw_estimates(
    axes: "Axes", panel: IntervalPanel, series: Sequence[str], from_zero: bool
) -> None:
    """Draws the estimates of a panel, grouping estimates of the same name."""
    # A line for each name, the first at the top.
    names = list(dict.fromkeys(row.name for row in panel.rows))
    thickness = 0.8 / len(series)
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)

    # Reference lines.
    if from_zero:
        axes.axvline(0, color=INK, linewidth=0.8)
    if panel.line is not None:
        label = panel.line_label or None
        axes.axvline(panel.line, color=COLOURS[2], linestyle="--", label=label)

    # The estimates of a series are drawn slightly to the side of the others of their names.
    for number, name in enumerate(series):
        rows = [row for row in panel.rows if row.series == name]
        shift = (number - (len(series) - 1) / 2) * thickness
        heights = [names.index(row.name) + shift for row in rows]
        ends = np.array([row.estimate for row in rows])  # [R, 3]: value, low, high
        values = ends[:, 0]
        colour = COLOURS[number % len(COLOURS)]
        if from_zero:
            width = 0.9 * thickness
            axes.barh(heights, values, width, color=colour, alpha=0.55)

        # Whiskers reach from each value to both ends, where these are known.
        whiskers = np.abs(ends[:, 1:] - values[:, None])  # [R, 2]
        whiskers[~np.isfinite(whiskers)] = 0
        axes.errorbar(
            values,
            heights,
            xerr=whiskers.T,
            fmt=_MARKERS[number % len(_MARKERS)],
            color=colour,
            markersize=4,
            capsize=2.5,
            linewidth=1.3,
            label=name or None,
        )


# ---------------------------------------------------------------------------
# Curves


class Curve(NamedTuple):
    """A line of a panel: its name and points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


class CurvePanel(NamedTuple):
    """A panel of curves."""

    title: str
    curves: Sequence[Curve]


def draw_curves(
    panels: Sequence[CurvePanel],
    *,
    x_label: str,
    y_label: str,
    y_limits: tuple[float, float | None] | None = None,
    log_x: bool = False,
) -> Drawing:
    """Returns curves.

    Args:
        panels: The curves.
        x_label: Label of the horizontal axis, with its unit.
        y_label: Label of the vertical axis, with its unit.
        y_limits: Ends of the vertical axis; None to fit either or both.
        log_x: Whether the horizontal axis is logarithmic.

    Raises:
        ConfigError: When there is no panel.
    """
    check(bool(panels), "panels", list(panels), "at least one panel")

    def draw(axes: "Axes", panel: CurvePanel) -> None:
        for number, curve in enumerate(panel.curves):
            style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "markersize": 4}
            if len(curve.x) <= _MARKED_POINTS:
                style["marker"] = _MARKERS[number % len(_MARKERS)]
            axes.plot(curve.x, curve.y, label=curve.name, **style)

        # All panels have the same axes.
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if log_x:
            axes.set_xscale("log")
        if y_limits is not None:
            axes.set_ylim(*y_limits)

    per_row = 2 if len(panels) > 1 else 1
    return Drawing(figure_svg(_draw_panels(panels, per_row, _CURVE_HEIGHT, draw)))


# ---------------------------------------------------------------------------
# Panels

_Panel = TypeVar("_Panel", HeatMap, IntervalPanel, CurvePanel)


def _draw_panels(
    panels: Sequence[_Panel],
    per_row: int,
    height: float,
    draw: Callable[["Axes", _Panel], None],
    extra: float = 0.0,
    width: float = _WIDTH,
) -> "Figure":
    """Returns a figure of panels with one legend for all.

    Args:
        panels: With a title each.
        per_row: Number of panels side by side.
        height: Height of a panel, in inches.
        draw: Draws a panel.
        extra: Height of everything else on the figure, in inches.
        width: Width of the figure, in inches.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    num_rows = math.ceil(len(panels) / per_row)
    with rc_context(STYLE):
        size = (width, num_rows * height + extra)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(num_rows, per_row, squeeze=False)
        places = list(grid.flat)
        for axes, panel in zip(places, panels, strict=False):
            draw(axes, panel)
            axes.set_title(panel.title, fontsize=10)

        # Remove unused axes; the legend goes below the panels.
        for axes in places[len(panels) :]:
            figure.delaxes(axes)
        names = {}
        for axes in figure.axes:
            handles, labels = axes.get_legend_handles_labels()
            names |= dict(zip(labels, handles, strict=True))
        if names:
            place = "outside lower center"
            figure.legend(list(names.values()), list(names), loc=place, ncols=4, fontsize=8)
    return figure
