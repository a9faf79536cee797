"""The routes of all messages of a schedule, in one table.

On a grid a message goes along the last axis first, the shorter way around each; at switches over as few
of them as possible. These ways are found for all pairs of ranks together, since a torus of thousands of
chips has tens of thousands. Where that way is broken, and on all other networks, a message takes a path
of the fewest links.
"""

import itertools
from typing import NamedTuple

import numpy as np

from moe.network.buffers import sorted_distinct
from moe.network.schedule import IntArray, Transfers, expand_runs, transfers
from moe.network.topology import FloatArray, Topology


class Routes(NamedTuple):
    """The routes between P pairs of ranks.

    Attributes:
        key: <int64>[P] number of each pair, sorted; see `pair_keys`.
        offset: <int64>[P + 1] row of `link` at which each route begins.
        link: <int64>[hops] links in the order in which a message crosses them.
        latency: <float64>[P] seconds of all links of a route.
        bandwidth: <float64>[P] bytes a second of the slowest link of a route.
        num_ranks: Ranks of the network.
    """

    key: IntArray
    offset: IntArray
    link: IntArray
    latency: FloatArray
    bandwidth: FloatArray
    num_ranks: int

    def hops(self, pair: IntArray) -> tuple[IntArray, IntArray]:
        """Returns the row and the link of every hop of some pairs' routes, in order."""
        row, place = expand_runs(self.offset[pair], self.offset[pair + 1] - self.offset[pair])
        return row, self.link[place]


def pair_keys(source: IntArray, destination: IntArray, num_ranks: int) -> IntArray:
    """Returns a number for each pair of ranks."""
    return source * num_ranks + destination


def find_routes(table: Transfers, topology: Topology) -> Routes:
    """Returns the routes of all pairs of ranks that exchange anything.

    Raises:
        ConfigError: If no path is left between two of them.
    """
    key = sorted_distinct(pair_keys(table.source, table.destination, topology.num_ranks))
    pair, link = _hops_by_axes(key, topology)

    # Other pairs are routed one by one.
    is_open = np.ones(len(key), np.bool_)
    is_open[pair] = False
    pairs = [pair]
    links = [link]
    for index in np.flatnonzero(is_open):
        source, destination = divmod(int(key[index]), topology.num_ranks)
        route = topology.shortest_path(source, destination)
        pairs.append(np.full(len(route), index))
        links.append(route)

    # Hops are sorted by pair, and stay in order.
    pair = np.concatenate(pairs)
    rows = np.argsort(pair, kind="stable")
    link = np.concatenate(links)[rows]
    offset = np.concatenate([[0], np.cumsum(np.bincount(pair, minlength=len(key)))])

    # A route is as fast as its slowest link, and as far as all of them.
    bandwidth = topology.links.bandwidth[link]
    slowest = np.minimum.reduceat(bandwidth, offset[:-1]) if len(key) else bandwidth
    latency = np.zeros(len(key))
    np.add.at(latency, pair[rows], topology.links.latency[link])
    return Routes(
        key=key,
        offset=offset,
        link=link,
        latency=latency,
        bandwidth=slowest,
        num_ranks=topology.num_ranks,
    )


def find_route(source: int, destination: int, topology: Topology) -> IntArray:
    """Returns the <int64>[hops] links that a message between two ranks crosses, in order.

    Raises:
        ConfigError: If no path is left.
    """
    if source == destination:
        return np.empty(0, np.int64)
    return find_routes(transfers(0, source, destination, 0, 1, adds=False), topology).link


def _hops_by_axes(key: IntArray, topology: Topology) -> tuple[IntArray, IntArray]:
    """Returns pair and link of every hop along the axes: last axis first, the shorter way around.

    Pairs whose way is broken have no hops, nor do any on a network that is neither a grid nor levels
    of switches.
    """
    if topology.switched:
        return _hops_by_switches(key, topology)
    if not topology.shape:
        return np.empty(0, np.int64), np.empty(0, np.int64)

    source, destination = np.divmod(key, topology.num_ranks)
    here = list(np.unravel_index(source, topology.shape))
    target = np.unravel_index(destination, topology.shape)

    # All pairs take a hop at a time.
    node = source
    pairs = [np.empty(0, np.int64)]
    links = [np.empty(0, np.int64)]
    for axis in reversed(range(len(topology.shape))):
        size = topology.shape[axis]

        distance = target[axis] - here[axis]
        if topology.wraps[axis]:
            distance = (distance + (size - 1) // 2) % size - (size - 1) // 2
        for hop in range(int(np.abs(distance).max(initial=0))):
            # Pairs that have arrived on this axis wait for the others.
            moves = np.abs(distance) > hop
            here[axis] = np.where(moves, here[axis] + np.sign(distance), here[axis]) % size
            following = np.ravel_multi_index(here, topology.shape)
            pairs.append(np.flatnonzero(moves))
            links.append(topology.find_links(node[moves], following[moves]))
            node = following

    pair = np.concatenate(pairs)
    link = np.concatenate(links)

    # Drop ways with a missing link.
    is_whole = np.bincount(pair, link < 0, minlength=len(key)) == 0
    return pair[is_whole[pair]], link[is_whole[pair]]


def _hops_by_switches(key: IntArray, topology: Topology) -> tuple[IntArray, IntArray]:
    """Returns pair and link of every hop between ranks at switches, over as few switches as possible.

    Inside a node over its switch, else over the top switch; if cards are shared, over both nodes'
    switches too.
    """
    source, destination = np.divmod(key, topology.num_ranks)
    top = np.full(len(key), topology.num_nodes - 1)
    per_node = topology.shape[-1]
    first_switch = topology.num_ranks
    near = first_switch + source // per_node
    far = first_switch + destination // per_node
    ways = [(source, near, destination), (source, top, destination)]
    ways.append((source, near, top, far, destination))

    # A pair takes the first way that is whole.
    is_open = np.ones(len(key), np.bool_)
    pairs: list[IntArray] = []
    links: list[IntArray] = []
    for way in ways:
        hops = [topology.find_links(*ends) for ends in itertools.pairwise(way)]  # [H][P]
        is_taken = is_open & (np.min(hops, axis=0) >= 0)
        for hop in hops:
            pairs.append(np.flatnonzero(is_taken))
            links.append(hop[is_taken])
        is_open &= ~is_taken
    return np.concatenate(pairs), np.concatenate(links)
