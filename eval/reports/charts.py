"""Charts as SVG that takes the colours of its page, light or dark."""

from collections.abc import Sequence
from html import escape

from eval.records import LengthBin
from eval.reports.formatting import format_interval, format_score
from eval.reports.scoreboard import DIFFERENT_SPLIT, Scoreboard, ScoreboardLine

_WIDTH, _LEFT, _RIGHT = 900, 250, 60
_BAR, _ROW, _GAP, _HEAD = 14, 21, 12, 18


def bar_chart(board: Scoreboard) -> str:
    """Returns a bar for each of our systems, baseline and published one; whiskers are 95 %
    intervals.
    """
    parts: list[str] = []
    top = _HEAD
    for line in (line for line in board.lines if line.in_chart):
        bars = _bars(board, line)
        if not bars:
            continue
        parts.append(
            f'<text x="0" y="{top}"><tspan font-weight="600">{escape(line.task)}</tspan>'
            f"<tspan> {escape(line.metric)}{line.marks}</tspan></text>"
        )
        top += 6
        for kind, name, value, low, high in bars:
            parts.append(_bar(top, kind, name, value, low, high))
            top += _ROW
        top += _GAP + _HEAD
    grid = "".join(
        f'<line class="grid" x1="{_x(value):.1f}" x2="{_x(value):.1f}" y1="{_HEAD}" y2="{top - _HEAD}"/>'
        f'<text class="soft" x="{_x(value):.1f}" y="{top - 2}" text-anchor="middle">{value}</text>'
        for value in range(0, 101, 20)
    )
    title = "Scores beside the published ones" if board.published else "Scores"
    return _svg(top + 4, title, grid + "".join(parts))


def _bars(
    board: Scoreboard, line: ScoreboardLine
) -> list[tuple[str, str, float, float | None, float | None]]:
    """Returns the kind, name, value and interval of each bar of a line."""
    bars = []
    for (name, mode), score in zip(board.systems, line.ours, strict=True):
        if score and score.value is not None:
            kind = "ours" if name == board.systems[0][0] else "ours2"
            bars.append((kind, f"{name}, {mode}", score.value, score.low, score.high))
    for name, score in line.baselines.items():
        bars.append(("theirs", name, score.value, score.low, score.high))
    for one in line.published:
        if one:
            mark = "" if one.split == line.split else DIFFERENT_SPLIT
            bars.append(("theirs", f"{one.system}{mark}", one.value, None, None))
    return bars


def _bar(
    top: float, kind: str, name: str, value: float, low: float | None, high: float | None
) -> str:
    """Returns one bar with its name, its value and its interval."""
    end = _x(max(0.0, value))
    baseline = top + _BAR - 3

    # The interval lies along the lower edge of the bar, so that the value can stand at the bar's
    # end.
    edge = top + _BAR + 1
    whisker = ""
    if low is not None and high is not None:
        ends = "".join(f"M{_x(x):.1f} {edge - 3}v6" for x in (low, high))
        whisker = (
            f'<path class="whisker" fill="none" d="M{_x(low):.1f} {edge}H{_x(high):.1f}{ends}"/>'
        )

    tip = f"{name}: {format_score(value)}" + (
        f" ({format_interval(low, high)})" if low is not None else ""
    )
    return (
        f'<g><title>{escape(tip)}</title><text x="{_LEFT - 8}" y="{baseline}" text-anchor="end">'
        f'{escape(_fit(name))}</text><rect class="{kind}" x="{_LEFT}" y="{top}" width="{max(0.0, end - _LEFT):.1f}" '
        f'height="{_BAR}"/>{whisker}<text x="{end + 6:.1f}" y="{baseline}">{format_score(value)}</text></g>'
    )


def histogram(bins: Sequence[LengthBin], limit: int) -> str:
    """Returns how many inputs have how many tokens; those past the limit in the second colour."""
    return _columns(
        [
            (
                f"{one['from']}",
                one.count,
                "theirs" if one.first > limit else "ours",
                f"{one['from']} to {one['to']} tokens: {one['count']:,} inputs",
            )
            for one in bins
        ],
        "Number of inputs by tokens",
    )


def load_bars(stack: str, load: Sequence[float]) -> str:
    """Returns the share of each expert of a stack in all tokens that were sent to one."""
    total = sum(load) or 1
    shares = [100 * one / total for one in load]
    return _columns(
        [
            (str(i), share, "ours", f"expert {i}: {share:.1f} %")
            for i, share in enumerate(shares, 1)
        ],
        f"Share of the load by expert, {stack}",
    )


def _columns(columns: Sequence[tuple[str, float, str, str]], title: str) -> str:
    """Returns columns of (label, value, kind, tip), with every label that has room."""
    height, width = 90, _WIDTH / max(len(columns), 1)
    most = max((value for _, value, _, _ in columns), default=1) or 1
    step = -(-36 // int(width)) if width >= 1 else len(columns)
    parts = [f'<text class="soft" x="0" y="12">{escape(title)}</text>']
    for number_, (label, value, kind, tip) in enumerate(columns):
        tall, left = height * value / most, number_ * width
        parts.append(
            f'<g><title>{escape(tip)}</title><rect class="{kind}" x="{left + 1:.1f}" y="{20 + height - tall:.1f}" '
            f'width="{max(0.5, width - 2):.1f}" height="{tall:.1f}"/></g>'
        )
        if number_ % max(1, step) == 0:
            parts.append(
                f'<text class="soft" x="{left + 1:.1f}" y="{height + 35}">{escape(label)}</text>'
            )
    return _svg(height + 40, title, "".join(parts))


def _svg(height: float, title: str, body: str) -> str:
    """Returns an <svg> element."""
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">{body}</svg>'


def _x(value: float) -> float:
    """Returns where a score in 0..100 lies."""
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(100.0, max(0.0, value)) / 100


def _fit(name: str) -> str:
    """Returns a name that fits beside a bar; its end, which tells modes apart, is kept."""
    return name if len(name) <= 36 else f"{name[:20]}…{name[-15:]}"
