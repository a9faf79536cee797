"""Orders of ranks for rings, on grids with and without holes.

The best order is a ring of neighbours, a Hamiltonian cycle of the live ranks: each hop is one link,
and no link is used twice. If none is known, messages between ranks of the ring take several links.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moe.checks import check
from moe.network.schedule import IntArray
from moe.network.topology import Topology

BoolArray = NDArray[np.bool_]
Block = tuple[int, int]
"""Row and column of a block of 2 x 2 ranks."""

_DIRECTIONS = ((1, 1), (0, 1), (1, -1), (0, -1))
"""Axis and sign: right, down, left, up."""


def mesh_of(topology: Topology) -> IntArray:
    """Returns the ranks of a mesh or torus, links between neighbours, as an array of its shape.

    Raises:
        ConfigError: If the network is not a grid.
    """
    shape = topology.shape
    is_mesh = bool(shape) and not topology.switched
    expected = "a grid of ranks with links between neighbours"
    check(is_mesh, "network", topology.name, expected)
    return np.arange(topology.num_ranks).reshape(shape)


def whole_grid_of(topology: Topology) -> IntArray:
    """Returns the ranks of a grid, or of levels of switches, without the lines that are dead.

    Raises:
        ConfigError: If the network is neither, or a line along an axis is dead in part.
    """
    shape = topology.shape
    expected = "a grid of ranks, or levels of switches"
    check(bool(shape), "network", topology.name, expected)
    grid = np.arange(topology.num_ranks).reshape(shape)
    is_dead = np.isin(grid, list(topology.dead))

    # Leave out lines all of whose ranks are dead.
    axes = range(grid.ndim)
    for axis in axes:
        others = tuple(other for other in axes if other != axis)
        is_kept = ~is_dead.all(axis=others)
        grid = np.compress(is_kept, grid, axis)
        is_dead = np.compress(is_kept, is_dead, axis)

    dead = grid[is_dead].tolist()
    expected = "none on a grid, or all ranks of a line"
    check(not dead, "dead ranks", dead, expected)
    return grid


def snake(grid: IntArray) -> IntArray:
    """Returns the ranks of a grid line by line, every other line backwards: all neighbours."""
    # Two axes to one, until one is left.
    path = grid
    while path.ndim > 1:
        turned = path.copy()
        turned[..., 1::2, :] = path[..., 1::2, ::-1]
        path = turned.reshape(*path.shape[:-2], -1)
    return path


def fold(grid: IntArray, wraps: Sequence[bool]) -> IntArray:
    """Returns a grid with the axes that do not wrap in the order 0, 2, 4, ..., 5, 3, 1.

    As a ring, a line then has hops of two links, and none from its end to its beginning. The bytes
    of its links are the same.

    Args:
        grid: <int64>[p_k, ..., p_1] ranks.
        wraps: Whether the ends of each axis are joined.
    """
    folded = grid
    for axis, is_ring in enumerate(wraps):
        places = np.arange(grid.shape[axis])
        if not is_ring:
            even = places[::2]
            odd = places[1::2]
            places = np.concatenate([even, odd[::-1]])
        folded = np.take(folded, places, axis)
    return folded


def pair_rows(grid: IntArray) -> IntArray:
    """Returns <int64>[..., Y / 2, 2 X] rings of two rows: out on the first, back on the second.

    Args:
        grid: <int64>[..., Y, X] ranks.

    Raises:
        ConfigError: If there are no two axes, or Y is odd.
    """
    check(grid.ndim >= 2, "shape of a mesh", grid.shape, "two axes or more, to pair rows")
    *others, num_rows, width = grid.shape
    check_paired(num_rows)

    pairs = grid.reshape(*others, num_rows // 2, 2, width)
    back = pairs[..., 1, ::-1]
    return np.concatenate([pairs[..., 0, :], back], axis=-1)


def check_paired(num_rows: int) -> None:
    """Raises a ConfigError unless a number of rows can be paired."""
    expected = "an even number of rows or columns"
    check(num_rows % 2 == 0, "number of lines to pair", num_rows, expected)


def survivor_order(topology: Topology) -> IntArray:
    """Returns the live ranks of any network in an order for a ring: on a grid line by line.

    Neighbours in the ring need not be neighbours on the network.
    """
    if not topology.shape or topology.switched:
        return topology.live_ranks
    order = snake(mesh_of(topology))
    return order[~np.isin(order, list(topology.dead))]


def neighbour_ring(topology: Topology) -> IntArray:
    """Returns the live ranks of a grid in an order in which each has a link to the next.

    A whole grid has such a ring when an axis has an even size or wraps. Around holes it is found
    where both sizes of a grid of two axes are even and its blocks of 2 x 2 ranks, counted from the
    corner, are each live or dead as a whole.

    Raises:
        ConfigError: If no such ring is known, with the reason.
    """
    return _ring_around_holes(topology) if topology.dead else _ring_of_whole(topology)


def _ring_of_whole(topology: Topology) -> IntArray:
    """Returns the ring of neighbours of a grid without holes."""
    grid = mesh_of(topology)
    is_axis = np.array(grid.shape) > 1
    wraps = np.array(topology.wraps)[is_axis]
    grid = grid.squeeze()

    # A line is a ring by itself, or none.
    if grid.size <= 2:
        return grid.reshape(-1)
    if grid.ndim == 1:
        expected = "one that wraps, to be a ring"
        check(bool(wraps[0]), "a line of ranks", grid.shape, expected)
        return grid

    # A table of neighbours: its rows an axis of even size, its columns all others in a line; or, if
    # all sizes are odd, its columns an axis that wraps.
    is_even = np.array(grid.shape) % 2 == 0
    if is_even.any():
        axis = int(np.argmax(is_even))
        rows = np.moveaxis(grid, axis, 0)
        table = np.stack([snake(row) for row in rows])
    else:
        expected = "an even size, or an axis that wraps"
        check(bool(wraps.any()), "shape of a mesh", grid.shape, expected)
        axis = int(np.argmax(wraps))
        columns = np.moveaxis(grid, axis, 0)
        table = np.stack([snake(column) for column in columns], axis=1)

    # Line by line down the table, and back up its first column.
    down = snake(table[:, 1:])
    back = table[::-1, 0]
    return np.concatenate([down, back])


def _ring_around_holes(topology: Topology) -> IntArray:
    """Returns the ring of neighbours around the dead ranks of a grid of two axes.

    Each block of 2 x 2 ranks is a ring, clockwise. Blocks that follow each other in a spanning tree
    are joined to one ring.
    """
    grid = mesh_of(topology)
    shape = grid.shape
    check(len(shape) == 2, "shape of a grid with dead ranks", shape, "two axes")
    is_even = all(size % 2 == 0 for size in shape)
    check(is_even, "shape of a grid with dead ranks", shape, "even sizes")
    blocks = _blocks(grid)
    is_live = _live_blocks(blocks, topology)

    # The next rank of each: first around its block, then around all.
    following = np.zeros(grid.size, np.int64)
    following[blocks] = np.roll(blocks, -1, axis=-1)
    for first, second, axis in _spanning_tree(is_live, topology.wraps):
        _join(blocks[first], blocks[second], following, is_below=axis == 0)

    # Walk around it.
    order = [int(topology.live_ranks[0])]
    while following[order[-1]] != order[0]:
        order.append(int(following[order[-1]]))
    num_live = len(topology.live_ranks)
    expected = f"no more than the {len(order)} that are connected to rank {order[0]}"
    check(len(order) == num_live, "live ranks", num_live, expected)
    return np.array(order, np.int64)


def _blocks(grid: IntArray) -> IntArray:
    """Returns the <int64>[Y / 2, X / 2, 4] blocks of 2 x 2 ranks of a grid, each clockwise."""
    top = grid[::2]
    bottom = grid[1::2]
    corners = (top[:, ::2], top[:, 1::2], bottom[:, 1::2], bottom[:, ::2])
    return np.stack(corners, axis=-1)


def _live_blocks(blocks: IntArray, topology: Topology) -> BoolArray:
    """Returns which blocks are live, <bool>[Y / 2, X / 2]; raises for one that is dead in part."""
    is_dead = np.isin(blocks, list(topology.dead))
    num_dead = is_dead.sum(axis=-1)
    torn = blocks[(num_dead > 0) & (num_dead < 4)]

    if len(torn):
        block = sorted(torn[0].tolist())
        dead = sorted(topology.dead.intersection(block))
        expected = f"none or all of the block {block} of 2 x 2 ranks"
        check(False, "dead ranks", dead, expected)
    check(bool((num_dead == 0).any()), "live ranks", [], "at least one")
    return num_dead == 0


def _spanning_tree(is_live: BoolArray, wraps: Sequence[bool]) -> list[tuple[Block, Block, int]]:
    """Returns edges that join all blocks that can be reached from the first live one.

    An edge is two neighbouring blocks, the one above or to the left first, and the axis on which
    they are neighbours.
    """
    shape = is_live.shape
    row, column = np.argwhere(is_live)[0].tolist()
    queue = deque([(row, column)])
    joined = set(queue)

    # Breadth first.
    edges: list[tuple[Block, Block, int]] = []
    while queue:
        block = queue.popleft()
        for axis, sign in _DIRECTIONS:
            place = block[axis] + sign
            is_inside = wraps[axis] or 0 <= place < shape[axis]
            place %= shape[axis]
            row, column = block
            neighbour = (place, column) if axis == 0 else (row, place)
            if not is_inside or not is_live[neighbour] or neighbour in joined:
                continue

            # The block above or to the left comes first.
            joined.add(neighbour)
            queue.append(neighbour)
            first, second = (block, neighbour) if sign > 0 else (neighbour, block)
            edges.append((first, second, axis))
    return edges


def _join(first: IntArray, second: IntArray, following: IntArray, *, is_below: bool) -> None:
    """Joins the rings of two neighbouring blocks, in place.

    Args:
        first: <int64>[4] block above or to the left, clockwise from its top left rank.
        second: <int64>[4] block below or to the right.
        following: <int64>[ranks] next rank in its ring.
        is_below: Whether the second block is below the first one.
    """
    # Corners: 0 top left, 1 top right, 2 bottom right, 3 bottom left.
    corner = 2 if is_below else 1
    following[first[corner]] = second[corner - 1]
    following[second[(corner - 2) % 4]] = first[corner + 1]
