"""Positions of the chips and links of a network on a page.

A grid of one or two axes is drawn as it is: two lanes between neighbours, one each way, and a stub
outwards where a link goes around the end of an axis. If there are more axes, the last two form a
plane; planes are drawn in rows, and the links between them are squares in the chips. The links of
switches are squares under a heading for their kind: with levels of switches a column for each node and
a row for each rank or card in it, otherwise in lines.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from moe.network.schedule import IntArray
from moe.network.topology import FloatArray, Topology

PITCH = 10.0
"""From one chip to the next; all other lengths are in the same unit."""

_CHIP = 6.0
_GAP = PITCH - _CHIP
_LANE = 2.4
_STUB = 2.6
_SQUARE = 1.8
_COLUMNS = 64
_HEAD = 9.0


class Layout(NamedTuple):
    """Rectangles of x, y, width and height.

    Attributes:
        width: Width of the page.
        height: Height of the page.
        chips: <float64>[ranks, 4] boxes of the ranks; none on a network without a grid.
        links: <float64>[links, 4] boxes of the links.
        labels: Text, x and y of each heading; none on a grid.
    """

    width: float
    height: float
    chips: FloatArray
    links: FloatArray
    labels: list[tuple[str, float, float]]


def place_network(topology: Topology) -> Layout:
    """Returns the position of every chip and link."""
    if topology.shape and not topology.switched:
        return _place_grid(topology)
    return _place_squares(topology)


def node_names(topology: Topology) -> list[str]:
    """Returns a name for each rank and switch; with two levels of switches, ranks have a node and a NIC."""
    num_switches = topology.num_nodes - topology.num_ranks
    if not topology.switched or len(topology.shape) == 1:
        ranks = [f"rank {rank}" for rank in range(topology.num_ranks)]
        return [*ranks, *(f"switch {switch}" for switch in range(num_switches))]

    # A card of each rank, or one card behind the switch of a node.
    per_node = topology.shape[1]
    top_links = topology.links.destination == topology.num_nodes - 1
    has_cards = bool((topology.links.source[top_links] < topology.num_ranks).any())
    names = []
    for rank in range(topology.num_ranks):
        node, index = divmod(rank, per_node)
        card = f", NIC {index}" if has_cards else ""
        names.append(f"rank {rank} (node {node}{card})")
    card = "" if has_cards else " and NIC"
    names += [f"switch{card} of node {node}" for node in range(num_switches - 1)]
    return [*names, "network switch"]


def _place_grid(topology: Topology) -> Layout:
    # One axis is a plane of one row; of three and more the first ones number the planes.
    shape = (1,) * max(0, 2 - len(topology.shape)) + topology.shape
    num_rows, num_columns = shape[-2:]
    num_planes = math.prod(shape[:-2])
    planes_a_row = math.ceil(math.sqrt(num_planes * num_rows / num_columns))
    planes_a_row = min(max(planes_a_row, 1), num_planes)
    plane_width = (num_columns + 1) * PITCH
    plane_height = (num_rows + 1) * PITCH

    # The plane of each rank, and its row and column there.
    plane, cell = np.divmod(np.arange(topology.num_ranks), num_rows * num_columns)
    row, column = np.divmod(cell, num_columns)
    x = plane % planes_a_row * plane_width + column * PITCH + _GAP
    y = plane // planes_a_row * plane_height + row * PITCH + _GAP
    chips = _boxes(x, y, _CHIP, _CHIP)
    return Layout(
        width=planes_a_row * plane_width,
        height=math.ceil(num_planes / planes_a_row) * plane_height,
        chips=chips,
        links=_place_lanes(topology, shape, chips),
        labels=[],
    )


def _place_lanes(topology: Topology, shape: tuple[int, ...], chips: FloatArray) -> FloatArray:
    """Returns the boxes of the links of a grid."""
    # Axis and distance of each link.
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
    lanes = _boxes(x, y, np.where(is_column, length, _LANE), np.where(is_column, _LANE, length))

    # Links between planes are squares in the chip, one each way.
    x = left + 0.9 + 2.4 * forward
    y = top + 0.9 + 2.4 * (axis % 2)
    is_outer = axis < len(shape) - 2
    return np.where(is_outer[:, None], _boxes(x, y, _SQUARE, _SQUARE), lanes)


def _place_squares(topology: Topology) -> Layout:
    # Links by the kinds of their ends: ranks, switches, and the switch of the whole network.
    links = topology.links
    kind = np.full(topology.num_nodes, 1)
    kind[: topology.num_ranks] = 0
    names = ["rank", "switch", "network"]
    if topology.switched and len(topology.shape) > 1:
        names[1] = "node"
        kind[-1] = 2

    boxes = np.zeros((len(links.source), 4))
    labels = []
    top = 0.0
    widest = 1
    kinds_of_ends = np.stack([kind[links.source], kind[links.destination]], axis=1)  # [links, 2]
    for pair in np.unique(kinds_of_ends, axis=0).tolist():
        rows = np.flatnonzero((kinds_of_ends == pair).all(axis=1))
        labels.append(
            (f"{len(rows)} links, {names[pair[0]]} to {names[pair[1]]}", 0.0, top + 0.7 * _HEAD)
        )
        column, line = _cells(topology, rows)

        # Blocks of columns below each other.
        block, column = np.divmod(column, _COLUMNS)
        line = line + block * (int(line.max()) + 2)
        boxes[rows] = _boxes(column * PITCH, top + _HEAD + line * PITCH, PITCH - 2.0, PITCH - 2.0)
        top += _HEAD + (int(line.max()) + 1) * PITCH
        widest = max(widest, int(column.max()) + 1)
    return Layout(widest * PITCH, top, chips=np.zeros((0, 4)), links=boxes, labels=labels)


def _cells(topology: Topology, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Returns the column and the line of links of one kind: node and rank of it, or one after the other."""
    if not topology.switched:
        line, column = np.divmod(np.arange(len(rows)), _COLUMNS)
        return column, line

    # The lower end is the rank, or the switch of a node.
    lower = np.minimum(topology.links.source[rows], topology.links.destination[rows])
    per_node = (*topology.shape, 1)[1]
    is_switch = lower >= topology.num_ranks
    node = np.where(is_switch, lower - topology.num_ranks, lower // per_node)
    return node, np.where(is_switch, 0, lower % per_node)


def _boxes(x: ArrayLike, y: ArrayLike, width: ArrayLike, height: ArrayLike) -> FloatArray:
    return np.stack(np.broadcast_arrays(x, y, width, height), axis=1)
