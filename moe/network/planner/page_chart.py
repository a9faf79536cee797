"""Chart of payload against time: the drawing, and which algorithm is the fastest for which payload.

Both axes are logarithmic. Between two payloads that were simulated a curve is a straight line.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from moe.network.topology import FloatArray

WIDTH = 760
HEIGHT = 380
_LEFT = 70
_RIGHT = 36
_TOP = 14
_BOTTOM = 44
_LEAST_RANGE = 4  # of the axis of times, which contains at least three multiples of powers of ten


@dataclass(frozen=True)
class Curve:
    """Times of one algorithm.

    Attributes:
        name: Name of the algorithm.
        payload_bytes: Payloads in ascending order, above 0; the same for all curves of a chart.
        seconds: Time of each payload, above 0.
    """

    name: str
    payload_bytes: tuple[float, ...]
    seconds: tuple[float, ...]


class Range(NamedTuple):
    """Payloads for which one algorithm is the fastest.

    Attributes:
        name: Name of the algorithm.
        low: Smallest payload in bytes: the crossing with the previous curve, or the first payload.
        high: Largest payload in bytes: the crossing with the next curve, or the last payload.
    """

    name: str
    low: float
    high: float


def fastest_ranges(curves: Sequence[Curve]) -> list[Range]:
    """Returns which curve is the lowest, from the smallest payload to the largest."""
    if not curves:
        return []
    x = np.log(curves[0].payload_bytes)
    y = np.log([curve.seconds for curve in curves])  # [curves, payloads]

    # Every two curves may cross between two payloads; the lowest one changes only there.
    cuts = {float(x[0]), float(x[-1])}
    for first in range(len(curves)):
        for second in range(first):
            cuts |= _crossings(x, y[first] - y[second])

    ranges: list[Range] = []
    for low, high in pairwise(sorted(cuts)):
        # Between two cuts the order of the curves does not change.
        middle = (low + high) / 2
        heights = [np.interp(middle, x, line) for line in y]
        name = curves[int(np.argmin(heights))].name
        if ranges and ranges[-1].name == name:
            ranges[-1] = ranges[-1]._replace(high=_number(high))
        else:
            ranges.append(Range(name, _number(low), _number(high)))
    return ranges


def _number(logarithm: float) -> float:
    return float(f"{math.exp(logarithm):.12g}")


def _crossings(x: FloatArray, difference: FloatArray) -> set[float]:
    """Returns the x at which a piecewise linear line is zero."""
    places = set()
    for left in range(len(x) - 1):
        # A change of sign between two payloads is a crossing.
        before = difference[left]
        after = difference[left + 1]
        if before * after < 0:
            share = before / (before - after)
            places.add(float(x[left] + share * (x[left + 1] - x[left])))
        elif before == 0:
            places.add(float(x[left]))
    return places


class Chart(NamedTuple):
    """Positions and labels of the SVG.

    Attributes:
        columns: x and label of each line of the grid of payloads.
        rows: y and label of each line of the grid of times.
        lines: Name, points of the polyline, and (x, y, text) of every payload of each curve.
        crossings: x and label of the payloads at which the fastest algorithm changes.
        payload: x of the payload of the plan.
    """

    columns: list[tuple[float, str]]
    rows: list[tuple[float, str]]
    lines: list[tuple[str, str, list[tuple[float, float, str]]]]
    crossings: list[tuple[float, str]]
    payload: float


def draw_chart(curves: Sequence[Curve], ranges: Sequence[Range], payload: float) -> Chart:
    """Returns the positions for a chart of WIDTH x HEIGHT.

    Args:
        curves: At least one.
        ranges: Result of `fastest_ranges`.
        payload: Payload of the plan in bytes, which the curves contain.
    """
    # The axes span all numbers.
    payloads = np.array(curves[0].payload_bytes)
    seconds = np.array([curve.seconds for curve in curves])
    across = _Scale(payloads.min(), payloads.max(), _LEFT, WIDTH - _RIGHT)
    longest = max(seconds.max(), _LEAST_RANGE * seconds.min())
    up = _Scale(seconds.min(), longest, HEIGHT - _BOTTOM, _TOP)

    lines = []
    for curve in curves:
        # Every payload is a point with a text.
        marks = []
        for num_bytes, time in zip(curve.payload_bytes, curve.seconds, strict=True):
            text = f"{curve.name}: {show_bytes(num_bytes)} in {show_seconds(time)}"
            marks.append((across(num_bytes), up(time), text))
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in marks)
        lines.append((curve.name, points, marks))

    crossings = [(across(part.low), show_bytes(part.low)) for part in ranges[1:]]
    return Chart(
        columns=[(across(number), show_bytes(number)) for number in across.powers(8)],
        rows=[(up(number), show_seconds(number)) for number in up.decimal_ticks()],
        lines=lines,
        crossings=crossings,
        payload=across(payload),
    )


class _Scale:
    """A logarithmic axis."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        self._low = math.log(low)
        self._range = math.log(high) - self._low or 1.0
        self._first = first
        self._last = last
        self._ends = (low, high)

    def __call__(self, number: float) -> float:
        share = (math.log(number) - self._low) / self._range
        return self._first + share * (self._last - self._first)

    def decimal_ticks(self) -> list[float]:
        """Returns the powers of ten on the axis; with multiples if there are fewer than three."""
        low, high = self._ends
        ticks: list[float] = []
        for multiples in ((1,), (1, 2, 5), range(1, 10)):
            ticks = []
            for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
                ticks += [multiple * 10.0**exponent for multiple in multiples]
            ticks = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
            if len(ticks) > 2:
                break
        return ticks

    def powers(self, base: int) -> list[float]:
        """Returns the powers of a number that are on the axis; both ends if there are none."""
        # A power that is rounded to just outside is on the axis.
        first = math.ceil(math.log(self._ends[0], base) - 1e-9)
        last = math.floor(math.log(self._ends[1], base) + 1e-9)
        numbers = [float(base) ** exponent for exponent in range(first, last + 1)]
        return numbers if len(numbers) > 1 else list(self._ends)


def show_seconds(seconds: float) -> str:
    """Returns a time with its unit."""
    return _show(seconds, {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}) if seconds else "0 s"


def show_bytes(number: float) -> str:
    """Returns a number of bytes with its binary unit."""
    return _show(number, {"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0})


def _show(number: float, sizes: Mapping[str, float]) -> str:
    """Returns three digits in the largest unit that gives at least 1, or else the smallest."""
    unit = next((unit for unit, size in sizes.items() if number >= size), list(sizes)[-1])
    return f"{float(f'{number / sizes[unit]:.3g}'):,g} {unit}"
