"""Positions of the ranks of a mesh on a network, and of the groups of each axis.

A placement gives every axis of the mesh a tile: its extent along each axis of the network. `tp` 16
may be a row of 16 chips of a torus or a tile of 4 x 4. Along an axis of the network the ranks of the innermost axis of
the mesh are neighbours, and the groups of an outer axis hop over them: e.g. rings of `ep` with strides of 4, side by
side. On levels of switches the axes of the network are nodes and the ranks of a node.

Next: `network` times the collectives of the groups.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from moe.checks import check
from moe.distributed.mesh import AXES as MESH_AXES
from moe.distributed.mesh import MeshConfig, divisors
from moe.network.schedule import IntArray
from moe.network.topology import Rate, Topology, grid, switch, two_level
from moe.planning.traffic import AXES, axis_sizes

_PARTS = ("dp_replicate", "dp_shard", "ep across", "ep inside", "tp")
"""Simple axes of a mesh, outermost first: `ep` by its two levels."""

_PARTS_OF = {"ep": ("ep across", "ep inside")}
"""Simple axes of an axis that has more than one."""

_NOMINAL = Rate(bandwidth=1.0, latency=0.0)
"""Rate of the links of a group's own network, of which builders only use the shape."""

_TILE = re.compile(r"\s*(\w+)\s*=\s*(\d{1,6}(?:x\d{1,6})*)\s*", re.ASCII)

Tile = tuple[int, ...]


class Groups(NamedTuple):
    """The groups of ranks along an axis of a mesh.

    Attributes:
        ranks: <int64>[groups, size] ranks of the network.
        layout: Network of a group alone; its rank i is the i-th rank of the group.
        strides: Distance between neighbours of a group along each axis of the network on which it has
            several ranks; empty if distances vary.
        description: For tables, e.g. `4 x 4, stride 8 x 1`.
    """

    ranks: IntArray
    layout: Topology
    strides: Tile
    description: str


@dataclass(frozen=True)
class Placement:
    """Positions of the ranks of a mesh on a network.

    Attributes:
        mesh: Sizes of the mesh.
        shape: Size of each axis of the network, slowest first; the number of ranks if it has no axes.
        wraps: Whether the ends of each axis are joined.
        switched: Whether the axes are levels of switches.
        tiles: Extent of each simple axis of the mesh along each axis of the network.
    """

    mesh: MeshConfig
    shape: Tile
    wraps: tuple[bool, ...]
    switched: bool
    tiles: Mapping[str, Tile]

    def __str__(self) -> str:
        texts = []
        for axis in MESH_AXES:
            if getattr(self.mesh, axis) > 1:
                texts.append(f"{axis}={_times(self.tile(axis))}")
        return ",".join(texts) or "one rank"

    def tile(self, axis: str) -> Tile:
        """Returns the extent of an axis of the mesh along each axis of the network."""
        parts = [self.tiles[part] for part in _PARTS_OF.get(axis, (axis,))]
        return tuple(math.prod(sizes) for sizes in zip(*parts, strict=True))

    @cached_property
    def ranks(self) -> IntArray:
        """<int64>[dp_replicate, dp_shard, ep across, ep inside, tp] rank of the network at each
        coordinate of the mesh.
        """
        # Coordinates of the mesh, each an index into the tile of its axis.
        sizes = [math.prod(self.tiles[part]) for part in _PARTS]
        coordinates = np.meshgrid(*(np.arange(size) for size in sizes), indexing="ij")

        # Digits of the index, times the distance between neighbours of the axis.
        positions = [np.zeros(sizes, np.int64) for _ in self.shape]
        for part, coordinate in zip(_PARTS, coordinates, strict=True):
            digits = np.unravel_index(coordinate, self.tiles[part])
            for axis, digit in enumerate(digits):
                positions[axis] += digit * self._stride(part, axis)
        return np.ravel_multi_index(positions, self.shape).astype(np.int64)

    def groups(self, axis: str) -> Groups:
        """Returns the groups of an axis of traffic.AXES."""
        # Members last: a row for each group.
        members = _members(axis)
        kept = [index for index, part in enumerate(_PARTS) if part not in members]
        moved = [index for index, part in enumerate(_PARTS) if part in members]
        size = math.prod(math.prod(self.tiles[part]) for part in members)
        ranks = self.ranks.transpose(*kept, *moved).reshape(-1, size)

        # The ranks of a group in the order of the network, not of the mesh.
        ranks = np.sort(ranks, axis=1)

        # Extent and stride of a group along each axis of the network.
        extents = []
        strides = []
        wraps = []
        for network_axis in range(len(self.shape)):
            extent, stride = self._reach(members, network_axis)
            if extent > 1:
                whole = stride * extent == self.shape[network_axis]
                extents.append(extent)
                strides.append(stride)
                wraps.append(self.switched or (self.wraps[network_axis] and whole))

        # A network of the group alone, for builders.
        if not extents:
            layout = switch(1, _NOMINAL)
        elif not self.switched:
            layout = grid(extents, wraps=wraps, bandwidth=1.0, latency=0.0)
        elif len(extents) == 1:
            layout = switch(extents[0], _NOMINAL)
        else:
            layout = two_level(*extents, inside=_NOMINAL, across=_NOMINAL)
        is_even = all(strides)
        description = _times(tuple(extents)) or "1"
        if not is_even:
            description += ", uneven strides"
        elif max(strides, default=1) > 1:
            description += f", stride {_times(tuple(strides))}"
        return Groups(ranks, layout, tuple(strides) if is_even else (), description)

    def _stride(self, part: str, axis: int) -> int:
        """Returns the distance between neighbours of a simple axis along an axis of the network."""
        inner = _PARTS[_PARTS.index(part) + 1 :]
        return math.prod(self.tiles[other][axis] for other in inner)

    def _reach(self, members: tuple[str, ...], axis: int) -> tuple[int, int]:
        """Returns the number of ranks of a group along an axis, and their stride; 0 if uneven."""
        # From the innermost axis out, each must continue where the previous one ended.
        reaching = [part for part in members if self.tiles[part][axis] > 1]
        extent = math.prod(self.tiles[part][axis] for part in reaching)
        stride = 0
        num_steps = 1
        for part in reversed(reaching):
            here = self._stride(part, axis)
            stride = stride or here
            if here != stride * num_steps:
                return extent, 0
            num_steps *= self.tiles[part][axis]
        return extent, stride


def place_in_order(mesh: MeshConfig, topology: Topology) -> Placement:
    """Returns the placement of rank r of the mesh at rank r of the network, as in torchrun.

    If the axes do not divide each other, the network is treated as one line of ranks.

    Raises:
        ConfigError: If the network has fewer ranks.
    """
    num_ranks = topology.num_ranks
    expected = f"no more than the {num_ranks:,} of {topology.name}"
    check(mesh.num_ranks <= num_ranks, "ranks of the mesh", mesh.num_ranks, expected)

    shape = topology.shape or (num_ranks,)
    tiles = _fill(mesh, shape)
    if tiles is not None:
        return _placement(mesh, topology, tiles)

    # A line of ranks.
    line = _fill(mesh, (num_ranks,))
    assert line is not None, "one axis takes all"
    return Placement(mesh, (num_ranks,), (topology.switched,), topology.switched, line)


def place_by_tiles(mesh: MeshConfig, topology: Topology, text: str) -> Placement:
    """Returns the placement that a text like `tp=4x4,ep=8x8` describes.

    Axes of one rank may be left out.

    Args:
        mesh: Sizes of the mesh.
        topology: The network.
        text: For each axis of the mesh its extent along each axis of the network.

    Raises:
        ConfigError: If the text is not a placement, or its tiles do not fit.
    """
    shape = topology.shape
    check(bool(shape), "--place", text, f"no placement: {topology.name} has no axes")

    # Axes of one rank need no tile.
    tiles = {axis: (1,) * len(shape) for axis in MESH_AXES}
    for item in text.split(","):
        match = _TILE.fullmatch(item)
        is_tile = match is not None and match[1] in MESH_AXES
        axes = ", ".join(MESH_AXES)
        check(is_tile, "--place", text, f"tiles of axes, e.g. tp=4x4,ep=8x8; axes are {axes}")
        assert match is not None, "it was checked"
        tiles[match[1]] = tuple(int(size) for size in match[2].split("x"))
    for axis, tile in tiles.items():
        size = getattr(mesh, axis)
        fits = len(tile) == len(shape) and math.prod(tile) == size
        expected = f"{axis} with {len(shape)} sizes, whose product is mesh.{axis}, {size}"
        check(fits, "--place", text, expected)

    # Tiles of all axes side by side must fit.
    for index, size in enumerate(shape):
        reach = math.prod(tile[index] for tile in tiles.values())
        expected = (
            f"tiles of at most {size} ranks along axis {index} of {topology.name}, not {reach}"
        )
        check(reach <= size, "--place", text, expected)
    return _placement(mesh, topology, _split_ep(mesh, tiles))


def all_placements(mesh: MeshConfig, topology: Topology) -> Iterator[Placement]:
    """Yields every placement that fills the network with tiles; only the one in order without axes."""
    if not topology.shape or mesh.num_ranks != topology.num_ranks:
        yield place_in_order(mesh, topology)
        return
    for tiles in _tilings(mesh, topology.shape, MESH_AXES):
        yield _placement(mesh, topology, _split_ep(mesh, tiles))


def _tilings(mesh: MeshConfig, shape: Tile, axes: tuple[str, ...]) -> Iterator[dict[str, Tile]]:
    """Yields the tiles of some axes whose products are a shape."""
    if not axes:
        if math.prod(shape) == 1:
            yield {}
        return

    # Every way to write the size of the last axis as a product of divisors of the shape.
    axis = axes[-1]
    size = getattr(mesh, axis)
    choices = []
    for extent in shape:
        choices.append([part for part in divisors(extent) if size % part == 0])
    for tile in itertools.product(*choices):
        if math.prod(tile) != size:
            continue
        rest = tuple(extent // part for extent, part in zip(shape, tile, strict=True))
        for others in _tilings(mesh, rest, axes[:-1]):
            yield {**others, axis: tile}


def _placement(mesh: MeshConfig, topology: Topology, tiles: Mapping[str, Tile]) -> Placement:
    shape = topology.shape or (topology.num_ranks,)
    wraps = topology.wraps or (False,)
    return Placement(mesh, shape, wraps, topology.switched, tiles)


def _fill(mesh: MeshConfig, shape: Tile) -> dict[str, Tile] | None:
    """Returns the tiles of ranks in order; None when an axis ends within a row of another."""
    # The innermost axis fills the last axis of the network first.
    sizes = axis_sizes(mesh)
    room = list(shape)
    tiles: dict[str, Tile] = {}
    axis = len(shape) - 1
    for part in reversed(_PARTS):
        tile = [1] * len(shape)
        left = sizes[part]
        while left > 1:
            # The rest of the row, or as much of it as the axis needs.
            if room[axis] == 1:
                if axis == 0:
                    return None
                axis -= 1
                continue
            step = min(left, room[axis])
            if left % step or room[axis] % step:
                return None
            tile[axis] *= step
            room[axis] //= step
            left //= step
        tiles[part] = tuple(tile)
    return tiles


def _split_ep(mesh: MeshConfig, tiles: Mapping[str, Tile]) -> dict[str, Tile]:
    """Returns tiles in which `ep` is split into its levels: ranks of a node are closest.

    Raises:
        ConfigError: If the tile of `ep` cannot be split so.
    """
    # Ranks of a node are along the last axis as far as possible.
    inside = [1] * len(tiles["ep"])
    across = list(tiles["ep"])
    left = mesh.ep // mesh.ep_nodes
    for axis in reversed(range(len(inside))):
        inside[axis] = math.gcd(left, across[axis])
        across[axis] //= inside[axis]
        left //= inside[axis]
    nodes = f"one that {mesh.ep_nodes} nodes (mesh.ep_nodes) can share evenly"
    check(left == 1, "the tile of ep", _times(tiles["ep"]), nodes)

    split = {axis: tile for axis, tile in tiles.items() if axis != "ep"}
    return {**split, "ep across": tuple(across), "ep inside": tuple(inside)}


def _members(axis: str) -> tuple[str, ...]:
    """Returns the simple axes that a group of an axis of traffic.AXES spans, outermost first."""
    members: list[str] = []
    for part in AXES[axis]:
        members += _PARTS_OF.get(part, (part,))
    return tuple(part for part in _PARTS if part in members)


def _times(sizes: Tile) -> str:
    return "x".join(str(size) for size in sizes)
