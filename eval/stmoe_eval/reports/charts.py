"""Charts as SVG that uses the colours of its page, light or dark."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from moe.inspection.formatting import format_interval, format_score
from stmoe_eval.reports.formatting import NOTED
from stmoe_eval.reports.records import InputLengths
from stmoe_eval.reports.scoreboard import Scoreboard, ScoreboardLine

_WIDTH = 640

# Bars of scores: names on the left, values to the right of the bars and their intervals.
_LEFT = 230
_RIGHT = 50
_BAR_HEIGHT = 14
_BAR_DISTANCE = 21
_TASK_DISTANCE = 12
_TITLE_HEIGHT = 18
_NAME_CHARACTERS = 36

# Columns of histograms.
_COLUMN_HEIGHT = 90
_LABEL_WIDTH = 36


class Bar(NamedTuple):
    """A bar of a score.

    Attributes:
        style: Class of the style sheet: `ours`, `ours2` or `theirs`.
        name: Label next to it.
        value: Score in percent.
        low: Lower end of the interval; None for none.
        high: Upper end of the interval; None for none.
        note: Caveat about the interval; empty for none.
    """

    style: str
    name: str
    value: float
    low: float | None = None
    high: float | None = None
    note: str = ""


class Column(NamedTuple):
    """A column of a histogram.

    Attributes:
        label: Text below it.
        value: Its height.
        style: Class of the style sheet.
        tooltip: Text shown on hover.
    """

    label: str
    value: float
    style: str
    tooltip: str


class _Axis:
    """The axis of scores: from 0, or the lowest end of an interval below it, to the highest one."""

    def __init__(self, bars: Sequence[Bar]) -> None:
        from matplotlib.ticker import MaxNLocator

        ends = [0.0]
        for bar in bars:
            ends += [end for end in (bar.value, bar.low, bar.high) if end is not None]
        locator = MaxNLocator(nbins=6, steps=[1, 2, 5, 10])
        self.ticks = [float(tick) for tick in locator.tick_values(min(ends), max(ends))]

    def x(self, value: float) -> float:
        """Returns the position of a score."""
        share = (value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * share


def bar_chart(board: Scoreboard) -> str:
    """Returns a bar for each of our systems, baseline and published one; whiskers are 95 %
    intervals.
    """
    bars_by_line = []
    for line in board.lines:
        bars = _bars(board, line) if line.in_chart else []
        if bars:
            bars_by_line.append((line, bars))
    axis = _Axis([bar for _, bars in bars_by_line for bar in bars])

    parts: list[str] = []
    top = _TITLE_HEIGHT
    for line, bars in bars_by_line:
        # A title for each task, its bars below it.
        parts.append(
            f'<text x="0" y="{top}"><tspan font-weight="600">{escape(line.task)}</tspan>'
            f"<tspan> {escape(line.metric)}{line.marks} (%)</tspan></text>"
        )
        top += 6
        for bar in bars:
            parts.append(_draw_bar(top, bar, axis))
            top += _BAR_DISTANCE
        top += _TASK_DISTANCE + _TITLE_HEIGHT

    # The grid is drawn behind the bars.
    grid = [_grid_line(value, top, axis) for value in axis.ticks]
    title = "Scores beside the published ones" if board.published else "Scores"
    return _svg(top + 4, title, "".join([*grid, *parts]))


def _bars(board: Scoreboard, line: ScoreboardLine) -> list[Bar]:
    """Returns the bars of one metric: ours, baselines, published ones."""
    bars = []

    # The evaluated model is highlighted.
    first_model = board.systems[0][0] if board.systems else ""
    for (name, mode), score in zip(board.systems, line.ours, strict=True):
        if score is not None and score.value is not None:
            style = "ours" if name == first_model else "ours2"
            title = f"{name}, {mode}"
            bars.append(Bar(style, title, score.value, score.low, score.high, score.note))
    for name, score in line.baselines.items():
        if score.value is not None:
            bars.append(Bar("theirs", name, score.value, score.low, score.high, score.note))
    for result in line.published:
        if result is not None:
            name = f"{result.system}{line.published_mark(result)}"
            bars.append(Bar("theirs", name, result.value))
    return bars


def _draw_bar(top: float, bar: Bar, axis: _Axis) -> str:
    """Returns one bar with its name, its interval and, right of both, its value."""
    left, end = sorted((axis.x(0.0), axis.x(bar.value)))
    right = end
    baseline = top + _BAR_HEIGHT - 3
    tooltip = f"{bar.name}: {format_score(bar.value)} %"
    value = format_score(bar.value)
    if bar.note:
        value += f" {NOTED}"

    whisker = ""
    if bar.low is not None and bar.high is not None:
        tooltip += f" ({format_interval(bar.low, bar.high)})"
        middle = top + _BAR_HEIGHT // 2
        right = max(right, axis.x(bar.high))
        low = f"{axis.x(bar.low):.1f}"
        high = f"{axis.x(bar.high):.1f}"
        ends = f"M{low} {middle - 3}v6M{high} {middle - 3}v6"
        style = "whisker noted" if bar.note else "whisker"
        whisker = f'<path class="{style}" fill="none" d="M{low} {middle}H{high}{ends}"/>'

    if bar.note:
        tooltip += f"; {bar.note}"

    return (
        f'<g><title>{escape(tooltip)}</title><text x="{_LEFT - 8}" y="{baseline}" text-anchor="end">'
        f'{escape(_shorten_name(bar.name))}</text><rect class="{bar.style}" x="{left:.1f}" y="{top}" '
        f'width="{end - left:.1f}" height="{_BAR_HEIGHT}"/>{whisker}'
        f'<text x="{right + 6:.1f}" y="{baseline}">{value}</text></g>'
    )


def _grid_line(value: float, bottom: float, axis: _Axis) -> str:
    """Returns a line at a score, with the score below it."""
    x = f"{axis.x(value):.1f}"
    return (
        f'<line class="grid" x1="{x}" x2="{x}" y1="{_TITLE_HEIGHT}" y2="{bottom - _TITLE_HEIGHT}"/>'
        f'<text class="soft" x="{x}" y="{bottom - 2}" text-anchor="middle">{value:g}</text>'
    )


def _shorten_name(name: str) -> str:
    """Returns a name shortened to fit next to a bar; its end, which identifies the mode, is kept."""
    if len(name) <= _NAME_CHARACTERS:
        return name
    return f"{name[:20]}…{name[-15:]}"


def length_histogram(lengths: InputLengths) -> str:
    """Returns a histogram of the inputs' lengths; lengths above the limit have the second colour."""
    columns = []
    for interval in lengths.histogram:
        style = "theirs" if interval.first > lengths.limit else "ours"
        tooltip = f"{interval.first} to {interval.last} tokens: {interval.count:,} inputs"
        columns.append(Column(f"{interval.first}", interval.count, style, tooltip))
    return _histogram(columns, "Number of inputs by tokens")


def load_chart(stack: str, load: Sequence[float]) -> str:
    """Returns the share of each expert of a stack in all tokens that were sent to one."""
    total = sum(load) or 1
    columns = []
    for expert, num_tokens in enumerate(load, start=1):
        share = 100 * num_tokens / total
        columns.append(Column(str(expert), share, "ours", f"expert {expert}: {share:.1f} %"))
    return _histogram(columns, f"Share of the load by expert, {stack}")


def _histogram(columns: Sequence[Column], title: str) -> str:
    """Returns columns, with every label that fits."""
    width = _WIDTH / max(len(columns), 1)
    largest = max((column.value for column in columns), default=1) or 1
    columns_per_label = len(columns)
    if width >= 1:
        columns_per_label = -(-_LABEL_WIDTH // int(width))

    parts = [f'<text class="soft" x="0" y="12">{escape(title)}</text>']
    for number, column in enumerate(columns):
        height = _COLUMN_HEIGHT * column.value / largest
        left = number * width
        parts.append(
            f'<g><title>{escape(column.tooltip)}</title><rect class="{column.style}" x="{left + 1:.1f}" '
            f'y="{20 + _COLUMN_HEIGHT - height:.1f}" width="{max(0.5, width - 2):.1f}" height="{height:.1f}"/></g>'
        )
        if number % max(1, columns_per_label) == 0:
            label = escape(column.label)
            parts.append(
                f'<text class="soft" x="{left + 1:.1f}" y="{_COLUMN_HEIGHT + 35}">{label}</text>'
            )
    return _svg(_COLUMN_HEIGHT + 40, title, "".join(parts))


def _svg(height: float, title: str, body: str) -> str:
    """Returns an <svg> element."""
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">{body}</svg>'
