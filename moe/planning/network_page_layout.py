"""Positions of the chips and links of a network on a page.

A grid of one or two axes is drawn as it is: two lanes between neighbours, one each way, and a stub
outwards where a link goes around the end of an axis. If there are more axes, the last two form a
plane; planes are drawn in rows, and the links between them are squares in the chips. The links of a
network without a grid are drawn in strips: up from the ranks, between switches, down to the ranks.
"""

import math
from typing import NamedTuple

import numpy as np

from moe.network.schedule import IntArray
from moe.network.topology import FloatArray, Topology

PITCH = 10.0
"""From one chip to the next; all other lengths are in the same unit."""

_CHIP = 6.0
_GAP = PITCH - _CHIP
_LANE = 2.4
_STUB = 2.6
_SQUARE = 1.8
_STRIP_COLUMNS = 64
_STRIP_HEAD = 9.0


class Layout(NamedTuple):
    """Rectangles of x, y, width and height.

    Attributes:
        width: Width of the page.
        height: Height of the page.
        chips: <float64>[ranks, 4] boxes of the ranks; none on a network without a grid.
        links: <float64>[links, 4] boxes of the links.
        strips: Title and y of each heading; none on a grid.
    """

    width: float
    height: float
    chips: FloatArray
    links: FloatArray
    strips: list[tuple[str, float]]


def place_network(topology: Topology) -> Layout:
    """Returns the position of every chip and link."""
    is_grid = bool(topology.shape) and not topology.switched
    return _place_grid(topology) if is_grid else _place_strips(topology)


def _place_grid(topology: Topology) -> Layout:
    # One axis is a plane of one row; of three and more the first ones number the planes.
    shape = (1,) * max(0, 2 - len(topology.shape)) + topology.shape
    num_rows, num_columns = shape[-2:]
    num_planes = math.prod(shape[:-2])
    planes_a_row = math.ceil(math.sqrt(num_planes * num_rows / num_columns))
    planes_a_row = min(max(planes_a_row, 1), num_planes)
    plane_width = (num_columns + 1) * PITCH
    plane_height = (num_rows + 1) * PITCH

    rank = np.arange(topology.num_ranks)

    # The plane of each rank, and its row and column there.
    plane, cell = np.divmod(rank, num_rows * num_columns)
    row, column = np.divmod(cell, num_columns)
    x = plane % planes_a_row * plane_width + column * PITCH + _GAP
    y = plane // planes_a_row * plane_height + row * PITCH + _GAP
    chips = _boxes(x, y, np.full(len(rank), _CHIP), np.full(len(rank), _CHIP))
    return Layout(
        width=planes_a_row * plane_width,
        height=math.ceil(num_planes / planes_a_row) * plane_height,
        chips=chips,
        links=_place_lanes(topology, shape, chips),
        strips=[],
    )


def _place_lanes(topology: Topology, shape: tuple[int, ...], chips: FloatArray) -> FloatArray:
    """Returns the boxes of the links of a grid."""
    # Along which axis each link goes, and how far.
    source = np.stack(np.unravel_index(topology.links.source, shape))  # [axes, links]
    destination = np.stack(np.unravel_index(topology.links.destination, shape))
    distance = destination - source
    axis = np.argmax(distance != 0, axis=0)
    links = np.arange(len(axis))
    hop = distance[axis, links]
    size = np.array(shape)[axis]

    # A link around the end of an axis goes outwards: against the sign of its distance.
    is_wrap = (np.abs(hop) == size - 1) & (size > 2)
    forward = (hop > 0) != is_wrap
    length = np.where(is_wrap, _STUB, _GAP)
    along = np.where(forward, _CHIP, -length)

    # Along the last axis to the right or left, along the one before it down or up: on the right.
    left, top = chips[topology.links.source, :2].T
    is_column = axis == len(shape) - 1
    across = np.where(forward == is_column, _CHIP - _LANE - 0.4, 0.4)
    x = left + np.where(is_column, along, across)
    y = top + np.where(is_column, across, along)
    width = np.where(is_column, length, _LANE)
    height = np.where(is_column, _LANE, length)

    # Links between planes are squares in the chip, one each way.
    is_outer = axis < len(shape) - 2
    x = np.where(is_outer, left + 0.9 + 2.4 * forward, x)
    y = np.where(is_outer, top + 0.9 + 2.4 * (axis % 2), y)
    width = np.where(is_outer, _SQUARE, width)
    height = np.where(is_outer, _SQUARE, height)
    return _boxes(x, y, width, height)


def _place_strips(topology: Topology) -> Layout:
    # Links by the kinds of their ends.
    links = topology.links
    from_rank = links.source < topology.num_ranks
    to_rank = links.destination < topology.num_ranks
    kinds = (
        ("from ranks to switches", from_rank & ~to_rank),
        ("between switches", ~from_rank & ~to_rank),
        ("from switches to ranks", ~from_rank & to_rank),
        ("between ranks", from_rank & to_rank),
    )

    boxes = np.zeros((len(links.source), 4))
    strips = []
    top = 0.0
    for title, is_kind in kinds:
        rows: IntArray = np.flatnonzero(is_kind)
        if not len(rows):
            continue
        strips.append((f"{len(rows)} links {title}", top + 0.7 * _STRIP_HEAD))

        # Squares in lines below the heading.
        line, place = np.divmod(np.arange(len(rows)), _STRIP_COLUMNS)
        y = top + _STRIP_HEAD + line * PITCH
        size = np.full(len(rows), PITCH - 2.0)
        boxes[rows] = _boxes(place * PITCH, y, size, size)
        top += _STRIP_HEAD + (line[-1] + 1) * PITCH

    widest = min(_STRIP_COLUMNS, max(len(links.source), 1))
    return Layout(
        width=widest * PITCH, height=top, chips=np.zeros((0, 4)), links=boxes, strips=strips
    )


def _boxes(x: FloatArray, y: FloatArray, width: FloatArray, height: FloatArray) -> FloatArray:
    return np.stack([x, y, width, height], axis=1)
