"""Latency and bandwidth of a network as its ranks measure them, and the time of schedules on it.

Every rank sends to one neighbour and receives from another, all at once and several times in a row,
as the steps of a schedule do. A message of a few bytes shows the latency, the difference of two
large ones the bandwidth. Then the all-reduces of `moe.network.algorithms` are run, and compared with
their simulation on a network of those numbers.

Ranks are started by torchrun, or else on this machine, over gloo.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from moe.checks import check
from moe.distributed.launch import World, launch
from moe.errors import ConfigError
from moe.network.algorithms import ALL_REDUCE
from moe.network.ranks.scheduled import ScheduledCollective
from moe.network.schedule import IntArray
from moe.network.simulate import simulate
from moe.network.topology import Rate, Topology
from moe.network.topology_file import parse_network
from moe.planning.table import show_bytes

_MOST_LOCAL_RANKS = 16
_ANSWER = "answer.json"
_FLOAT_BYTES = 4
_SMALL = 1
"""Floats of the message that measures the latency."""

_LARGE = (2**18, 2**20)
"""Floats of the messages whose difference measures the bandwidth."""

_STEPS = {_SMALL: 50, _LARGE[0]: 10, _LARGE[1]: 5}
"""Number of exchanges in a row, by floats of a message."""

_REPEATS = 5
_UNITS_PER_RANK = 48
_PAYLOADS = (2**16, 2**22)
"""Bytes for which schedules are timed."""


class Trial(NamedTuple):
    """The measured time of a schedule.

    Attributes:
        algorithm: Name of the algorithm.
        payload_bytes: Bytes that were summed.
        seconds: Time of the slowest rank, the minimum over repeats.
        predicted: Simulated seconds on the measured network.
    """

    algorithm: str
    payload_bytes: int
    seconds: float
    predicted: float


class Measurement(NamedTuple):
    """A measured network.

    Attributes:
        content: The network as a mapping, with measured numbers.
        trials: Times of schedules.
    """

    content: dict[str, Any]
    trials: tuple[Trial, ...]


def measure_network(content: Mapping[str, Any]) -> Measurement | None:
    """Returns a network with the numbers that its ranks measured.

    Under torchrun every rank must call it, and the first one gets the answer.

    Args:
        content: The network as a mapping; its form and sizes determine which ranks are neighbours.

    Raises:
        ConfigError: If its form has no neighbours, or it does not have the ranks that are running.
    """
    # Reject a network that cannot be measured before any rank starts.
    topology = parse_network(content).topology
    targets = _targets(content, topology)
    check(bool(targets), "a network to measure", topology.name, "two ranks at least")
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        with launch() as world:
            return _measure_on(world, content)
    return _measure_here(content, topology.num_ranks)


def _measure_here(content: Mapping[str, Any], num_ranks: int) -> Measurement:
    """Starts ranks on this machine, and returns what they measured."""
    if num_ranks > _MOST_LOCAL_RANKS:
        raise ConfigError(
            f"The network has {num_ranks:,} ranks, but at most {_MOST_LOCAL_RANKS} are started on "
            "one machine. Start the ranks of all machines with torchrun, or reduce them in the file."
        )

    # Ranks meet in a file, and the first one writes its answer to another.
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, num_ranks, dict(content))
        start_processes(_run_rank, arguments, nprocs=num_ranks, start_method="forkserver")
        answer = json.loads((Path(folder) / _ANSWER).read_text(encoding="utf-8"))
    trials = tuple(Trial(*row) for row in answer["trials"])
    return Measurement(answer["content"], trials)


def _run_rank(rank: int, folder: str, num_ranks: int, content: dict[str, Any]) -> None:
    """Measures as one of the ranks of this machine; the first writes the answer."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_ranks)
    try:
        answer = _measure_on(World(rank, num_ranks, rank, "cpu"), content)
        if answer is not None:
            text = json.dumps(answer._asdict())
            (Path(folder) / _ANSWER).write_text(text, encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _measure_on(world: World, content: Mapping[str, Any]) -> Measurement | None:
    """Measures among the running ranks; the first one returns the answer.

    Raises:
        ConfigError: If the network does not have the ranks that are running.
    """
    topology = parse_network(content).topology
    running = f"the {world.size} that are running"
    check(topology.num_ranks == world.size, "ranks of the network", topology.num_ranks, running)
    device = torch.device(world.device_type)

    # The rates of the file, then its schedules.
    rates = []
    for keys, target in _targets(content, topology):
        rates.append((keys, _rate(target, world.rank, device)))
    measured = _with_rates(content, rates, world)
    trials = _run_schedules(parse_network(measured).topology, device)
    return Measurement(measured, trials) if world.rank == 0 else None


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
        exchange = partial(_exchange, sent, destination, received, source, num_steps)
        seconds[numel] = _least_seconds(exchange, device) / num_steps

    # A line through the two large messages; noise must not make it flat.
    small, large = _LARGE
    num_bytes = (large - small) * _FLOAT_BYTES
    longer = max(seconds[large] - seconds[small], 0.1 * seconds[large])
    return Rate(bandwidth=num_bytes / longer, latency=seconds[_SMALL])


def _exchange(
    sent: torch.Tensor, destination: int, received: torch.Tensor, source: int, num_steps: int
) -> None:
    for _ in range(num_steps):
        send = dist.P2POp(dist.isend, sent, destination)
        receive = dist.P2POp(dist.irecv, received, source)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()


def _least_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Returns the least over repeats of the seconds that the slowest rank takes.

    Other work on the machine only adds to it.
    """
    repeats = []
    for _ in range(_REPEATS):
        dist.barrier()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        repeats.append(float(slowest))
    return min(repeats)


def _with_rates(
    content: Mapping[str, Any], rates: list[tuple[tuple[str, ...], Rate]], world: World
) -> dict[str, Any]:
    """Returns a network file with measured rates: of several for one key the slowest."""
    # A grid has one rate for all its axes.
    slowest: dict[tuple[str, ...], Rate] = {}
    for keys, rate in rates:
        other = slowest.get(keys, rate)
        bandwidth = min(rate.bandwidth, other.bandwidth)
        slowest[keys] = Rate(bandwidth, max(rate.latency, other.latency))

    # The file with other numbers.
    measured = json.loads(json.dumps(dict(content)))
    for keys, rate in slowest.items():
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


def _run_schedules(topology: Topology, device: torch.device) -> tuple[Trial, ...]:
    """Returns the measured and the simulated time of every all-reduce that fits."""
    trials = []
    for name in ALL_REDUCE.names():
        algorithm = ALL_REDUCE.get(name)
        if algorithm.unfit(topology):
            continue
        schedule = algorithm.build(topology, topology.num_ranks * _UNITS_PER_RANK)
        collective = ScheduledCollective(schedule)
        for num_bytes in _PAYLOADS:
            buffer = torch.zeros(num_bytes // _FLOAT_BYTES, device=device)
            seconds = _least_seconds(partial(collective.run, buffer), device)
            predicted = simulate(schedule, topology, num_bytes).seconds
            trials.append(Trial(name, num_bytes, seconds, predicted))
    return tuple(sorted(trials, key=attrgetter("payload_bytes", "seconds")))


def show_measurement(measurement: Measurement) -> str:
    """Returns the measured rates, and the schedules next to the predictions, as text."""
    # Each rate, by its keys in the file.
    content = measurement.content
    network = parse_network(content)
    lines = [f"{network.topology.name}: {network.notes[0]}"]
    for keys in dict.fromkeys(keys for keys, _ in _targets(content, network.topology)):
        part = content
        for key in keys:
            part = part[key]
        speed = f"{part['bandwidth'] / 1e9:.4g} GB/s, {part['latency'] * 1e6:.4g} us"
        lines.append(f"  {'.'.join(keys)}: {speed}")

    heading = f"{'all-reduce of':<16}{'schedule':<24}{'measured':>12}{'predicted':>12}"
    lines.append(f"{heading}  ms; the CPU's sums are not in the prediction")
    for trial in measurement.trials:
        times = f"{trial.seconds * 1e3:>12.4g}{trial.predicted * 1e3:>12.4g}"
        lines.append(f"  {show_bytes(trial.payload_bytes):<14}{trial.algorithm:<24}{times}")
    return "\n".join(lines)
