"""The links between ranks: bandwidth and latency.

Links are directed. A network may have nodes that are not ranks, such as switches; they are numbered
after the ranks. Dead ranks have no links: messages go around them.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe.checks import check, check_integer
from moe.errors import ConfigError
from moe.network.schedule import IntArray

FloatArray = NDArray[np.float64]


class Links(NamedTuple):
    """Directed links, a row each.

    Attributes:
        source: <int64>[links] node that sends.
        destination: <int64>[links] node that receives.
        bandwidth: <float64>[links] bytes a second.
        latency: <float64>[links] seconds from the first byte sent to the first one received.
    """

    source: IntArray
    destination: IntArray
    bandwidth: FloatArray
    latency: FloatArray


class Rate(NamedTuple):
    """Rate of the link from a rank, or a node, to a switch.

    Attributes:
        bandwidth: Bytes a second in each direction.
        latency: Seconds of a message from rank to rank through the switch.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True, eq=False)
class Topology:
    """A network of ranks, switches and links: a grid, levels of switches, or any other graph.

    Attributes:
        name: Name in tables.
        num_ranks: Nodes that take part in collectives, numbered first.
        num_nodes: All nodes: ranks, then switches.
        links: The links that work.
        shape: Grid: size of each axis, slowest first. Levels of switches: size of each level, e.g.
            (nodes, ranks of a node). Empty for other networks.
        wraps: Whether the ends of each axis are joined; True for levels of switches, where every
            order of ranks is a ring.
        switched: Whether `shape` counts levels of switches instead of axes of a grid.
        dead: Ranks that have failed.
    """

    name: str
    num_ranks: int
    num_nodes: int
    links: Links
    shape: tuple[int, ...] = ()
    wraps: tuple[bool, ...] = ()
    switched: bool = False
    dead: frozenset[int] = frozenset()

    @cached_property
    def live_ranks(self) -> IntArray:
        """<int64>[live] ranks that have not failed."""
        return np.array([rank for rank in range(self.num_ranks) if rank not in self.dead], np.int64)

    def without(self, ranks: Iterable[int]) -> "Topology":
        """Returns the network after ranks have failed, and with them all their links.

        Raises:
            ConfigError: If a rank does not exist.
        """
        dead = frozenset(ranks)
        for rank in dead:
            check_integer("a dead rank", rank, least=0, most=self.num_ranks - 1)
        is_dead = np.isin(self.links.source, list(dead)) | np.isin(
            self.links.destination, list(dead)
        )
        working = Links._make(column[~is_dead] for column in self.links)
        return replace(self, links=working, dead=self.dead | dead)

    def find_links(self, source: ArrayLike, destination: ArrayLike) -> IntArray:
        """Returns <int64>[...] the link of each pair of nodes; -1 where there is none."""
        pair = np.asarray(source) * self.num_nodes + np.asarray(destination)
        sorted_pairs, index = self._links_by_pair
        if not len(index):
            return np.full(pair.shape, -1)
        place = np.minimum(np.searchsorted(sorted_pairs, pair), len(index) - 1)
        return np.where(sorted_pairs[place] == pair, index[place], -1)

    @cached_property
    def _links_by_pair(self) -> tuple[IntArray, IntArray]:
        """Numbers of the pairs of nodes that have a link, sorted, and the link of each."""
        pairs = self.links.source * self.num_nodes + self.links.destination
        index = np.argsort(pairs)
        return pairs[index], index

    @cached_property
    def _neighbours(self) -> dict[int, list[int]]:
        """Nodes that each node has a link to."""
        neighbours: dict[int, list[int]] = {}
        ends = zip(self.links.source.tolist(), self.links.destination.tolist(), strict=True)
        for source, destination in ends:
            neighbours.setdefault(source, []).append(destination)
        return neighbours

    def shortest_path(self, source: int, destination: int) -> IntArray:
        """Returns the <int64>[hops] links of a path of the fewest links.

        Among several such paths, the one whose links come first in the table.

        Raises:
            ConfigError: If no path is left.
        """
        # Breadth first.
        previous = {source: source}
        queue = deque([source])
        while queue and destination not in previous:
            node = queue.popleft()
            for neighbour in self._neighbours.get(node, ()):
                if neighbour not in previous:
                    previous[neighbour] = node
                    queue.append(neighbour)
        if destination not in previous:
            raise ConfigError(
                f"{self.name} has no path left from rank {source} to rank {destination}. Declare the unreachable "
                "ranks dead."
            )

        # Back from the destination.
        nodes = [destination]
        while nodes[-1] != source:
            nodes.append(previous[nodes[-1]])
        nodes.reverse()
        return self.find_links(nodes[:-1], nodes[1:])


def grid(
    shape: Sequence[int],
    *,
    wraps: bool | Sequence[bool],
    bandwidth: float,
    latency: float,
    name: str = "",
) -> Topology:
    """Returns a grid of ranks with links between neighbours along each axis, both ways.

    Args:
        shape: Size of each axis, slowest first, as of an array: rank = y * X + x for (Y, X).
        wraps: Whether the ends of each axis are joined (a torus); one for all, or one an axis. An
            axis of two ranks has no second link between them.
        bandwidth: Bytes a second of a link in each direction.
        latency: Seconds of a link.
        name: For tables.
    """
    sizes = tuple(shape)
    rings = (wraps,) * len(sizes) if isinstance(wraps, bool) else tuple(wraps)
    check(len(rings) == len(sizes), "wraps", rings, f"one for each of {len(sizes)} axes")

    # Pairs of neighbours along each axis; the last rank's neighbour is the first where it wraps.
    ranks = np.arange(int(np.prod(sizes))).reshape(sizes)
    source: list[IntArray] = []
    destination: list[IntArray] = []
    for axis, size in enumerate(sizes):
        num_pairs = size if rings[axis] and size > 2 else size - 1
        near = np.take(ranks, np.arange(num_pairs), axis).ravel()
        far = np.take(ranks, (np.arange(num_pairs) + 1) % size, axis).ravel()
        source += [near, far]
        destination += [far, near]

    links = _equal_links(source, destination, Rate(bandwidth, latency))
    default = " x ".join(str(size) for size in sizes) + (" torus" if all(rings) else " mesh")
    return Topology(name or default, ranks.size, ranks.size, links, sizes, rings)


def switch(num_ranks: int, rate: Rate, *, name: str = "") -> Topology:
    """Returns ranks around one switch that never blocks: a flat network.

    Args:
        num_ranks: Ranks.
        rate: Rate of each rank's link to the switch.
        name: For tables.
    """
    # The switch is the node after the ranks.
    ranks = np.arange(num_ranks)
    links = _joined(ranks, np.full(num_ranks, num_ranks), rate)
    default = f"{num_ranks:,} ranks at a switch"
    return Topology(
        name=name or default,
        num_ranks=num_ranks,
        num_nodes=num_ranks + 1,
        links=links,
        shape=(num_ranks,),
        wraps=(True,),
        switched=True,
    )


def two_level(
    num_nodes: int,
    per_node: int,
    *,
    inside: Rate,
    across: Rate,
    shared_card: bool = False,
    name: str = "",
) -> Topology:
    """Returns nodes of some ranks around a switch each, which one more switch joins.

    The ranks of a node are consecutive: rank = node * per_node + index in the node. The switches
    never block; only the links to them slow a message down.

    Args:
        num_nodes: Nodes, or racks of hosts.
        per_node: Ranks of a node, or hosts of a rack.
        inside: Rate of each rank's link to the switch of its node.
        across: Rate of each network card, or of the uplink of a rack.
        shared_card: Whether a node has one card behind its switch, shared by its ranks; else every
            rank has its own card.
        name: For tables.
    """
    # A switch for each node, then the one above.
    num_ranks = num_nodes * per_node
    ranks = np.arange(num_ranks)
    node_switch = num_ranks + ranks // per_node
    top_switch = num_ranks + num_nodes

    # Links inside come first: of two paths of as many links a message takes that inside its node.
    near = _joined(ranks, node_switch, inside)
    members = np.unique(node_switch) if shared_card else ranks
    far = _joined(members, np.full(len(members), top_switch), across)

    links = Links._make(np.concatenate(columns) for columns in zip(near, far, strict=True))
    default = f"{num_nodes:,} nodes of {per_node:,} ranks"
    return Topology(
        name=name or default,
        num_ranks=num_ranks,
        num_nodes=top_switch + 1,
        links=links,
        shape=(num_nodes, per_node),
        wraps=(True, True),
        switched=True,
    )


def _joined(members: IntArray, switches: IntArray, rate: Rate) -> Links:
    """Returns links from members to their switches and back, half of the latency each."""
    up_and_down = [members, switches], [switches, members]
    return _equal_links(*up_and_down, Rate(rate.bandwidth, rate.latency / 2))


def _equal_links(source: list[IntArray], destination: list[IntArray], rate: Rate) -> Links:
    num_links = sum(len(column) for column in source)
    return Links(
        source=np.concatenate(source),
        destination=np.concatenate(destination),
        bandwidth=np.full(num_links, float(rate.bandwidth)),
        latency=np.full(num_links, float(rate.latency)),
    )
