"""Latency and bandwidth of a network as its ranks feel them, and how long schedules take there.

Every rank sends to a neighbour and receives from another one, all at once and several times in a
row, as the steps of a schedule do. A message of a few bytes shows the latency, the difference of
two large ones the bandwidth. Then the all-reduces of `moe.network.algorithms` are run beside what
the simulation says on a network of those numbers.

Ranks are those of torchrun; without it they are started on this machine, over gloo.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from moe.checks import check
from moe.distributed.launch import World, launch
from moe.distributed.scheduled import ScheduledCollective
from moe.errors import ConfigError
from moe.network.algorithms import ALL_REDUCE
from moe.network.schedule import IntArray
from moe.network.simulate import simulate
from moe.network.topology import Rate, Topology
from moe.network.topology_file import parse_network
from moe.planning.table import show_bytes

_MOST_LOCAL_RANKS = 16
_ANSWER = "answer.json"
_FLOAT_BYTES = 4
_SMALL = 1
"""Floats of the message that shows the latency."""

_LARGE = (2**18, 2**20)
"""Floats of the messages whose difference shows the bandwidth."""

_STEPS = {_SMALL: 50, _LARGE[0]: 10, _LARGE[1]: 5}
"""Exchanges in a row by floats of a message."""

_REPEATS = 5
_UNITS_PER_RANK = 48
_PAYLOADS = (2**16, 2**22)
"""Bytes for which schedules are timed."""


class Trial(NamedTuple):
    """A schedule that ran.

    Attributes:
        algorithm: Its name.
        payload_bytes: Bytes that were summed.
        seconds: Least time of the slowest rank.
        predicted: Simulated seconds on the measured network.
    """

    algorithm: str
    payload_bytes: int
    seconds: float
    predicted: float


class Measurement(NamedTuple):
    """What was measured.

    Attributes:
        content: The network as a mapping, with measured numbers.
        trials: Schedules that ran.
    """

    content: dict[str, Any]
    trials: tuple[Trial, ...]


class _Pattern(NamedTuple):
    """Who sends to whom when a rate of a network file is measured.

    Attributes:
        keys: Where the rate stands in the file.
        target: <int64>[ranks] the rank that each sends to.
    """

    keys: tuple[str, ...]
    target: IntArray


def measure_network(content: Mapping[str, Any]) -> Measurement | None:
    """Returns a network with the numbers that its ranks measured.

    Under torchrun every rank must call it, and the first one gets the answer.

    Args:
        content: The network as a mapping; its form and sizes say which ranks are neighbours.

    Raises:
        ConfigError: When it has a form that has no neighbours, or other ranks than are running.
    """
    # What cannot be measured is refused before a rank starts.
    topology = parse_network(content).topology
    patterns = _patterns(content, topology)
    check(bool(patterns), "a network to measure", topology.name, "two ranks at least")
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        with launch() as world:
            return _measure_on(world, content)
    return _measure_here(content, topology.num_ranks)


def _measure_here(content: Mapping[str, Any], num_ranks: int) -> Measurement:
    """Starts ranks on this machine, and returns what they measured."""
    if num_ranks > _MOST_LOCAL_RANKS:
        raise ConfigError(
            f"The network has {num_ranks:,} ranks, and at most {_MOST_LOCAL_RANKS} are started on "
            "one machine. Start the ranks of all machines with torchrun, or give the file fewer."
        )

    # They meet in a file, and the first one answers in another.
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
        ConfigError: When others are running than the network has.
    """
    topology = parse_network(content).topology
    running = f"the {world.size} that are running"
    check(topology.num_ranks == world.size, "ranks of the network", topology.num_ranks, running)
    device = torch.device(world.device_type)

    # The rates of the file, then its schedules.
    rates = []
    for pattern in _patterns(content, topology):
        rates.append((pattern.keys, _rate(pattern, world.rank, device)))
    measured = _with_rates(content, rates, world)
    trials = _run_schedules(parse_network(measured).topology, device)
    return Measurement(measured, trials) if world.rank == 0 else None


def _patterns(content: Mapping[str, Any], topology: Topology) -> list[_Pattern]:
    """Returns who sends to whom for each rate of a file.

    Raises:
        ConfigError: When the form of the file is not known to have neighbours.
    """
    if not topology.shape:
        raise ConfigError(
            "A network of `links` cannot be measured link by link. Describe it as a grid, a switch "
            "or two_level."
        )
    ranks = np.arange(topology.num_ranks).reshape(topology.shape)
    forward = [np.roll(ranks, -1, axis).ravel() for axis in range(ranks.ndim)]

    # The rate of each level; the one rate of a grid along each axis.
    keys: list[tuple[str, ...]] = [("grid",)] * ranks.ndim
    if "switch" in content:
        keys = [("switch",)]
    elif "two_level" in content:
        keys = [("two_level", "across"), ("two_level", "inside")]
    patterns = []
    for axis, size in enumerate(topology.shape):
        if size > 1:
            patterns.append(_Pattern(keys[axis], forward[axis]))
    return patterns


def _rate(pattern: _Pattern, rank: int, device: torch.device) -> Rate:
    """Returns the latency and bandwidth of one pattern."""
    # Each rank has one that it sends to and one that it hears.
    target = int(pattern.target[rank])
    source = int(np.flatnonzero(pattern.target == rank)[0])
    seconds = {}
    for numel, num_steps in _STEPS.items():
        sent = torch.zeros(numel, device=device)
        received = torch.empty(numel, device=device)

        def exchange(
            sent: torch.Tensor = sent, received: torch.Tensor = received, num_steps: int = num_steps
        ) -> None:
            for _ in range(num_steps):
                _exchange(sent, target, received, source)

        seconds[numel] = _least_seconds(exchange, device) / num_steps

    # A line through the two large messages; their noise must not make it flat.
    small, large = _LARGE
    num_bytes = (large - small) * _FLOAT_BYTES
    longer = max(seconds[large] - seconds[small], 0.1 * seconds[large])
    return Rate(bandwidth=num_bytes / longer, latency=seconds[_SMALL])


def _exchange(sent: torch.Tensor, target: int, received: torch.Tensor, source: int) -> None:
    operations = [dist.P2POp(dist.isend, sent, target), dist.P2POp(dist.irecv, received, source)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _least_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Returns the least over repeats of the seconds that the slowest rank takes.

    What others do on the machine only adds to it.
    """
    repeats = []

    # All start together, and the slowest counts.
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

    # What was measured replaces what was assumed.
    backend = dist.get_backend()
    version = torch.__version__
    measured["notes"] = [
        f"Bandwidth and latency are measured: {world.size} ranks at once, {backend}, torch {version}."
    ]
    return measured


def _run_schedules(topology: Topology, device: torch.device) -> tuple[Trial, ...]:
    """Returns the time of every all-reduce that fits, and what the simulation says."""
    # Every algorithm that fits, for a small and a large payload.
    trials = []
    for name in ALL_REDUCE.names():
        algorithm = ALL_REDUCE.get(name)
        if algorithm.unfit(topology):
            continue
        schedule = algorithm.build(topology, topology.num_ranks * _UNITS_PER_RANK)
        collective = ScheduledCollective(schedule)
        for num_bytes in _PAYLOADS:
            buffer = torch.zeros(num_bytes // _FLOAT_BYTES, device=device)

            def run(
                collective: ScheduledCollective = collective, buffer: torch.Tensor = buffer
            ) -> None:
                collective.run(buffer)

            seconds = _least_seconds(run, device)
            predicted = simulate(schedule, topology, num_bytes).seconds
            trials.append(Trial(name, num_bytes, seconds, predicted))
    return tuple(sorted(trials, key=_by_payload))


def _by_payload(trial: Trial) -> tuple[int, float]:
    return trial.payload_bytes, trial.seconds


def show_measurement(measurement: Measurement) -> str:
    """Returns the measured rates, and the schedules beside what was predicted, as text."""
    # Each rate where it stands in the file.
    content = measurement.content
    network = parse_network(content)
    lines = [f"{network.topology.name}: {network.notes[0]}"]
    for keys in dict.fromkeys(pattern.keys for pattern in _patterns(content, network.topology)):
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
