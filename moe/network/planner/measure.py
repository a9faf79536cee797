"""Latency and bandwidth of a network as its ranks measure them.

Every rank sends to one neighbour and receives from another, all at once and several times in a row,
as the steps of a schedule do. A message of a few bytes shows the latency, the difference of two
large ones the bandwidth.
"""

import json
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe.checks import check
from moe.distributed.launch import World, launch
from moe.errors import ConfigError
from moe.network.schedule import IntArray
from moe.network.topology import Rate, Topology
from moe.network.topology_file import parse_network

_FLOAT_BYTES = 4
_SMALL = 1
"""Floats of the message that measures the latency."""

_LARGE = (2**18, 2**20)
"""Floats of the messages whose difference measures the bandwidth."""

_STEPS = {_SMALL: 50, _LARGE[0]: 10, _LARGE[1]: 5}
"""Number of exchanges in a row, by floats of a message."""

_REPEATS = 5


def measure_network(content: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
    """Returns a network with the numbers that its ranks measured, and these as text; None but on the
    first rank.

    Args:
        content: The network as a mapping; its form and sizes determine which ranks are neighbours.

    Raises:
        ConfigError: If its form has no neighbours, or it does not have the ranks that are running.
    """
    # Reject a network that cannot be measured before ranks meet.
    topology = parse_network(content).topology
    targets = _targets(content, topology)
    check(bool(targets), "a network to measure", topology.name, "two ranks at least")
    num_running = os.environ.get("WORLD_SIZE", "1")
    if str(topology.num_ranks) != num_running:
        raise ConfigError(
            f"The network has {topology.num_ranks:,} ranks, but {num_running} are running. Start them on all its "
            "machines: torchrun ... -m stmoe network --on FILE --measure OUT.json."
        )

    with launch() as world:
        device = torch.device(world.device_type)
        rates: dict[tuple[str, ...], Rate] = {}
        for keys, target in targets:
            rate = _rate(target, world.rank, device)

            # A grid has one rate for all its axes: the slowest.
            other = rates.get(keys, rate)
            bandwidth = min(rate.bandwidth, other.bandwidth)
            rates[keys] = Rate(bandwidth, max(rate.latency, other.latency))
        if world.rank > 0:
            return None
        measured = _with_rates(content, rates, world)
        lines = [f"{topology.name}: {measured['notes'][0]}"]
        for keys, rate in rates.items():
            speed = f"{rate.bandwidth / 1e9:.4g} GB/s, {rate.latency * 1e6:.4g} us"
            lines.append(f"  {'.'.join(keys)}: {speed}")
        return measured, "\n".join(lines)


def _targets(
    content: Mapping[str, Any], topology: Topology
) -> list[tuple[tuple[str, ...], IntArray]]:
    """Returns the position of each rate in the file, and <int64>[ranks] the rank that each rank
    sends to.

    Raises:
        ConfigError: If the network has no axes along which ranks have neighbours.
    """
    if not topology.shape:
        raise ConfigError(
            "A network of `links` cannot be measured link by link. Describe it as a grid, a switch "
            "or two_level."
        )

    # A grid has the same rate along each axis.
    keys: list[tuple[str, ...]] = [("grid",)] * len(topology.shape)
    if "switch" in content:
        keys = [("switch",)]
    elif "two_level" in content:
        keys = [("two_level", "across"), ("two_level", "inside")]

    ranks = np.arange(topology.num_ranks).reshape(topology.shape)
    targets = []
    for axis, size in enumerate(topology.shape):
        if size > 1:
            targets.append((keys[axis], np.roll(ranks, -1, axis).ravel()))
    return targets


def _rate(target: IntArray, rank: int, device: torch.device) -> Rate:
    """Returns the latency and bandwidth if every rank sends to its target at once."""
    destination = int(target[rank])
    source = int(np.flatnonzero(target == rank)[0])
    seconds = {}
    for numel, num_steps in _STEPS.items():
        sent = torch.zeros(numel, device=device)
        received = torch.empty(numel, device=device)

        # Other work on the machine only adds to the time.
        repeats = [
            _exchange_seconds(sent, destination, received, source, num_steps)
            for _ in range(_REPEATS)
        ]
        seconds[numel] = min(repeats) / num_steps

    # A line through the two large messages; noise must not make it flat.
    small, large = _LARGE
    num_bytes = (large - small) * _FLOAT_BYTES
    longer = max(seconds[large] - seconds[small], 0.1 * seconds[large])
    return Rate(bandwidth=num_bytes / longer, latency=seconds[_SMALL])


def _exchange_seconds(
    sent: torch.Tensor, destination: int, received: torch.Tensor, source: int, num_steps: int
) -> float:
    """Returns the seconds that the slowest rank takes for some exchanges in a row."""
    device = sent.device
    dist.barrier()
    start = time.perf_counter()
    for _ in range(num_steps):
        send = dist.P2POp(dist.isend, sent, destination)
        receive = dist.P2POp(dist.irecv, received, source)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
    if device.type == "cuda":
        torch.cuda.synchronize()
    slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _with_rates(
    content: Mapping[str, Any], rates: Mapping[tuple[str, ...], Rate], world: World
) -> dict[str, Any]:
    """Returns a network file with measured rates."""
    measured = json.loads(json.dumps(dict(content)))
    for keys, rate in rates.items():
        part = measured
        for key in keys:
            part = part[key]
        part.update(rate._asdict())

    # Measured numbers replace assumed ones.
    backend = dist.get_backend()
    version = torch.__version__
    measured["notes"] = [
        f"Bandwidth and latency are measured: {world.size} ranks at once, {backend}, torch {version}."
    ]
    return measured
