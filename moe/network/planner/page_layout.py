"""Positions of the chips and links of a network on a page.

A grid of one or two axes is drawn as it is: two lanes between neighbours, one each way, and a stub
outwards where a link goes around the end of an axis. If there are more axes, the last two form a
plane; planes are drawn in rows, and the links between them are squares in the chips. The links of
switches are squares: with levels of switches a column for each node and a row for each rank or card
in it, otherwise in lines.
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
_COLUMNS = 64
_COLUMNS_PER_LABEL = 8
_HEAD = 9.0
_MARGIN = 30.0


class Layout(NamedTuple):
    """Rectangles of x, y, width and height.

    Attributes:
        width: Width of the page.
        height: Height of the page.
        chips: <float64>[ranks, 4] boxes of the ranks; none on a network without a grid.
        links: <float64>[links, 4] boxes of the links.
        labels: Text, x and y of each heading and of the columns and rows of links; none on a grid.
    """

    width: float
    height: float
    chips: FloatArray
    links: FloatArray
    labels: list[tuple[str, float, float]]


def place_network(topology: Topology) -> Layout:
    """Returns the position of every chip and link."""
    if topology.switched:
        return _place_levels(topology)
    return _place_grid(topology) if topology.shape else _place_lines(topology)


def node_names(topology: Topology) -> list[str]:
    """Returns a name for each rank and switch; with two levels of switches, ranks have a node and a NIC."""
    switches = range(topology.num_nodes - topology.num_ranks)
    if not topology.switched or len(topology.shape) == 1:
        ranks = [f"rank {rank}" for rank in range(topology.num_ranks)]
        return [*ranks, *(f"switch {switch}" for switch in switches)]

    # A card of each rank, or one card behind the switch of a node.
    num_nodes, per_node = topology.shape
    top_links = topology.links.destination == topology.num_nodes - 1
    has_cards = bool((topology.links.source[top_links] < topology.num_ranks).any())
    names = []
    for rank in range(topology.num_ranks):
        node, index = divmod(rank, per_node)
        card = f", NIC {index}" if has_cards else ""
        names.append(f"rank {rank} (node {node}{card})")
    card = "" if has_cards else " and NIC"
    return [
        *names,
        *(f"switch{card} of node {node}" for node in range(num_nodes)),
        "network switch",
    ]


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
    width = np.where(is_column, length, _LANE)
    height = np.where(is_column, _LANE, length)

    # Links between planes are squares in the chip, one each way.
    is_outer = axis < len(shape) - 2
    x = np.where(is_outer, left + 0.9 + 2.4 * forward, x)
    y = np.where(is_outer, top + 0.9 + 2.4 * (axis % 2), y)
    width = np.where(is_outer, _SQUARE, width)
    height = np.where(is_outer, _SQUARE, height)
    return _boxes(x, y, width, height)


def _place_levels(topology: Topology) -> Layout:
    """Returns squares in a column for each node, in blocks of _COLUMNS nodes, and a row for each rank in it."""
    links = topology.links
    is_flat = len(topology.shape) == 1
    num_nodes, per_node = (*topology.shape, 1)[:2]
    columns = "rank" if is_flat else "node"
    distance = 1 if num_nodes <= _COLUMNS_PER_LABEL else _COLUMNS_PER_LABEL
    top_switch = topology.num_nodes - 1
    kinds = (
        ("from ranks to the switch of their node", "rank", False, False),
        ("from the switch of a node to its ranks", "rank", False, True),
        ("from network cards to the network", "NIC", True, False),
        ("from the network to network cards", "NIC", True, True),
    )
    if is_flat:
        kinds = (
            ("from ranks to the switch", "", True, False),
            ("from the switch to ranks", "", True, True),
        )

    boxes = np.zeros((len(links.source), 4))
    labels = []
    y = 0.0
    for title, row_name, is_upper, is_down in kinds:
        upper = links.source if is_down else links.destination
        lower = links.destination if is_down else links.source
        rows: IntArray = np.flatnonzero(((upper == top_switch) == is_upper) & (lower < upper))
        if not len(rows):
            continue

        # The node of each link, and its rank there; a switch of a node has one card.
        member = lower[rows]
        is_switch = member >= topology.num_ranks
        node = np.where(is_switch, member - topology.num_ranks, member // per_node)
        index = np.where(is_switch, 0, member % per_node)
        num_rows = int(index.max()) + 1

        # A block of columns below another.
        labels.append((title, 0.0, y + 0.7 * _HEAD))
        y += _HEAD
        block_height = _HEAD + num_rows * PITCH
        block, column = np.divmod(node, _COLUMNS)
        x = _MARGIN + column * PITCH
        size = np.full(len(rows), PITCH - 2.0)
        boxes[rows] = _boxes(x, y + block * block_height + _HEAD + index * PITCH, size, size)
        for first in range(0, num_nodes, _COLUMNS):
            labels.append((columns, 0.0, y + 0.7 * _HEAD))
            for number in range(first, min(num_nodes, first + _COLUMNS), distance):
                labels.append((str(number), _MARGIN + (number - first) * PITCH, y + 0.7 * _HEAD))
            for number in range(num_rows if row_name else 0):
                middle = y + _HEAD + (number + 0.7) * PITCH
                labels.append((f"{row_name} {number}", 0.0, middle))
            y += block_height
    width = _MARGIN + min(_COLUMNS, num_nodes) * PITCH
    return Layout(width=width, height=y, chips=np.zeros((0, 4)), links=boxes, labels=labels)


def _place_lines(topology: Topology) -> Layout:
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
    labels = []
    top = 0.0
    for title, is_kind in kinds:
        rows: IntArray = np.flatnonzero(is_kind)
        if not len(rows):
            continue
        labels.append((f"{len(rows)} links {title}", 0.0, top + 0.7 * _HEAD))

        # Squares in lines below the heading.
        line, place = np.divmod(np.arange(len(rows)), _COLUMNS)
        y = top + _HEAD + line * PITCH
        size = np.full(len(rows), PITCH - 2.0)
        boxes[rows] = _boxes(place * PITCH, y, size, size)
        top += _HEAD + (line[-1] + 1) * PITCH

    widest = min(_COLUMNS, max(len(links.source), 1))
    return Layout(
        width=widest * PITCH, height=top, chips=np.zeros((0, 4)), links=boxes, labels=labels
    )


def _boxes(x: FloatArray, y: FloatArray, width: FloatArray, height: FloatArray) -> FloatArray:
    return np.stack([x, y, width, height], axis=1)
