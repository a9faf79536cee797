"""All-reduces on the networks of the papers: their laws, their published times, and failed chips.

Payloads are those of ResNet-50 in float32 and of BERT-large in bfloat16. The rate of a link of a TPU
v3 is published as 70, 82 and 100 GB/s.
"""

import itertools
from dataclasses import replace

import numpy as np

from benchmarks.network_rows import (
    CLOSED_FORM,
    PRIMARY,
    PROTOTYPE,
    REPORTS,
    VENDOR,
    Claim,
    Row,
    published,
)
from moe.distributed.mesh import MeshConfig
from moe.network.algorithms import ALL_REDUCE
from moe.network.planner.placement import place_in_order
from moe.network.planner.timing import NetworkTimer
from moe.network.ring_orders import snake
from moe.network.rings import (
    factorisations,
    multi_ring_all_reduce,
    ring_all_reduce,
    row_pair_all_reduce,
    torus_all_reduce,
)
from moe.network.schedule import IntArray, Schedule
from moe.network.simulate import Simulation, simulate
from moe.network.topology import FloatArray, Links, Topology, grid
from moe.network.topology_file import Network
from moe.planning.traffic import Collective, Kind

RESNET_BYTES = 25.6e6 * 4
BERT_BYTES = 334e6 * 2

LINK_RATE = 70e9
"""Bytes a second of a link of a TPU v3 in one direction: the lowest of the published rates."""

_FITTED = "fit of 2 constants"

UNITS_PER_CHIP = 64
"""Enough units that chunks of every schedule here differ by at most 2 %."""

CORES_PER_CHIP = 2


def chips(shape: tuple[int, int], *, wraps: bool | tuple[bool, bool], latency: float) -> Topology:
    """Returns a grid of TPU v3 chips."""
    return grid(shape, wraps=wraps, bandwidth=LINK_RATE, latency=latency)


def torus_schedule(shape: tuple[int, ...]) -> Schedule:
    """Returns the 2-D sum, both ways around each ring, the last axis first."""
    ranks = np.arange(np.prod(shape)).reshape(shape)
    return torus_all_reduce(ranks, ranks.size * UNITS_PER_CHIP)


def torus_shape(num_chips: int) -> tuple[int, int]:
    """Returns the squarest grid of a power of two."""
    # Half of the bits for the rows, the rest for the columns.
    num_rows = 2 ** (num_chips.bit_length() // 2 - (num_chips.bit_length() % 2 == 0))
    num_rows = min(num_rows, num_chips // num_rows)
    return num_rows, num_chips // num_rows


@REPORTS.register("scaling")
def scaling_rows() -> list[Row]:
    """Returns R1 and R2: ResNet-50 from 16 to 1,024 chips, on a model of two fitted numbers.

    The time of a step is proportional to the images per core, plus a constant and the time of the all-reduce, which is
    not fitted. The two constants make 16 and 1,024 chips exact. They say little about the network: with an all-reduce
    of no time, or of ten times as much, the fit is about as good. The last two rows show this, and
    nothing is asserted.
    """
    # The logged values, and the share of the network alone.
    runs = published("resnet_v0.6")
    images = np.array([run["batch"] / run["chips"] / CORES_PER_CHIP for run in runs])
    logged = np.array([run["block"] / run["steps"] for run in runs])
    sums = np.array([_torus_seconds(run["chips"]) for run in runs])

    steps = fitted_steps(images, logged, sums)
    rows = []
    for run, step in zip(runs, steps, strict=True):
        what = f"ResNet-50, {run['chips']} chips: block of {run['steps']} steps"
        claim = Claim("R1*", what, "s", PRIMARY)
        rows.append(claim.reported(float(step) * run["steps"], run["block"], _FITTED))

    # From the last but one run to the last one.
    speedup = Claim("R2*", "ResNet-50: speed-up from 512 to 1,024 chips", "x", PRIMARY)
    ours = float(steps[-2] / steps[-1])
    rows.append(speedup.reported(ours, runs[-2]["block"] / runs[-1]["block"], _FITTED))

    # How much of the fit depends on the all-reduce.
    for what, times in (("as simulated", sums), ("of no time", np.zeros_like(sums))):
        error = np.abs(fitted_steps(images, logged, times) / logged - 1).max()
        claim = Claim("R1*", f"largest error of a block, with an all-reduce {what}", "%", PRIMARY)
        rows.append(claim.reported(100 * float(error), None, _FITTED))
    return rows


def fitted_steps(images: FloatArray, logged: FloatArray, sums: FloatArray) -> FloatArray:
    """Returns seconds of a step of each run: the images, a constant and the all-reduce.

    Args:
        images: <float64>[runs] images of a core in a step.
        logged: <float64>[runs] seconds of a step; the first and the last are met exactly.
        sums: <float64>[runs] seconds of the all-reduce.
    """
    ends = [0, -1]
    design = np.stack([images[ends], np.ones(2)], axis=1)
    per_image, constant = np.linalg.solve(design, (logged - sums)[ends])
    return per_image * images + constant + sums


def _torus_seconds(num_chips: int) -> float:
    """Returns the all-reduce of ResNet-50's gradients on a torus of so many chips."""
    shape = torus_shape(num_chips)
    topology = chips(shape, wraps=True, latency=2e-6)
    return simulate(torus_schedule(shape), topology, RESNET_BYTES).seconds


@REPORTS.register("multipod")
def multipod_rows() -> list[Row]:
    """Returns R7: 4,096 chips, of which Y (32) wraps and X (128) does not.

    The all-reduce is the planner's: the rings of X, which has no wrap, are folded.
    """
    topology = chips((128, 32), wraps=(False, True), latency=2e-6)
    schedule = ALL_REDUCE.get("torus").build(topology, topology.num_ranks * UNITS_PER_CHIP)
    simulation = simulate(schedule, topology, RESNET_BYTES)
    claim = Claim("R7", "bytes of the second axis over those of the first", "", CLOSED_FORM)
    return [claim.close(_payload_ratio(simulation), 1 / 32, 1e-9)]


def _payload_ratio(simulation: Simulation) -> float:
    """Returns the payload of the X rings divided by the payload of the Y rings.

    A ring of p chips carries 2 (p - 1) / p of its payload over its links, in two directions.
    """
    # Bytes by axis: Y varies within a row of the array.
    table = simulation.schedule.transfers
    num_bytes = (table.high - table.low).astype(float)
    num_columns = simulation.topology.shape[1]
    is_first_axis = table.source // num_columns == table.destination // num_columns
    by_axis = [float(num_bytes[is_first_axis].sum()), float(num_bytes[~is_first_axis].sum())]
    sizes = (num_columns, simulation.topology.shape[0])
    payloads = [total / (size - 1) * size for total, size in zip(by_axis, sizes, strict=True)]
    return payloads[1] / payloads[0]


@REPORTS.register("laws")
def law_rows() -> list[Row]:
    """Returns R5 and R6: steps, and bytes of the busiest link."""
    rows = []
    for size in (4, 16, 32):
        # Steps of both ways to sum on a square.
        along_axes = torus_schedule((size, size)).num_steps
        around = ring_all_reduce(snake(np.arange(size**2).reshape(size, size)), size**2).num_steps
        two = Claim("R5", f"steps on {size} x {size} chips along two axes", "", CLOSED_FORM)
        one = Claim("R5", f"steps on {size} x {size} chips around one ring", "", CLOSED_FORM)
        rows.append(two.close(along_axes, 4 * (size - 1), 1e-12))
        rows.append(one.close(around, 2 * (size**2 - 1), 1e-12))

    for shape in ((16, 16), (16, 32), (32, 32)):
        rows += _bandwidth_rows(shape)
    return rows


def _bandwidth_rows(shape: tuple[int, int]) -> list[Row]:
    """Returns the rows of R6: the time divided by the time of the payload on one link without latency."""
    num_chips = shape[0] * shape[1]
    ranks = np.arange(num_chips).reshape(shape)

    # Without latency, only the bytes count.
    torus = chips(shape, wraps=True, latency=0.0)
    mesh = chips(shape, wraps=False, latency=0.0)
    schedule = torus_schedule(shape)
    pairs = row_pair_all_reduce(ranks, num_chips * UNITS_PER_CHIP)

    bound = 1 - 1 / num_chips
    rows = []
    for topology, factor in ((torus, bound), (mesh, 2 * bound)):
        claim = Claim(
            "R6", f"bytes of the busiest links of each axis, {topology.name}", "S", CLOSED_FORM
        )
        rows.append(claim.close(_load_factor(schedule, topology), factor, 1e-9))

    time = Claim("R6", f"time of that, {mesh.name}", "S / b", PROTOTYPE)
    rows.append(time.between(_bytes_factor(schedule, mesh), 1.9 * bound, 2 * bound))
    if num_chips >= 512:
        paired = Claim("R6", f"time of pairs of rows, {mesh.name}", "S / b", PROTOTYPE)
        rows.append(paired.between(_bytes_factor(pairs, mesh), bound, 1.05))
    return rows


def _load_factor(schedule: Schedule, topology: Topology) -> float:
    """Returns the bytes of the busiest link of each axis together, over the bytes of the payload."""
    simulation = simulate(schedule, topology, RESNET_BYTES)

    # Axes are used one after the other: their loads add up.
    axis = axis_of_links(topology)
    busiest = [simulation.link_bytes[axis == index].max() for index in range(len(topology.shape))]
    return float(sum(busiest)) / RESNET_BYTES


def _bytes_factor(schedule: Schedule, topology: Topology) -> float:
    """Returns seconds over those that the payload takes on one link."""
    seconds = simulate(schedule, topology, RESNET_BYTES).seconds
    return seconds * LINK_RATE / RESNET_BYTES


def axis_of_links(topology: Topology) -> IntArray:
    """Returns <int64>[links] the axis of a grid along which each link goes."""
    links = topology.links

    # The coordinate in which both ends differ.
    ends = np.unravel_index(np.stack([links.source, links.destination]), topology.shape)
    return np.argmax([end[0] != end[1] for end in ends], axis=0)


@REPORTS.register("levels")
def level_rows() -> list[Row]:
    """Returns R9: the formula of multi-rings for all factorisations, and which of two is faster."""
    # Factorisations with no level of a single rank.
    levels = [sizes for sizes in factorisations(64, 3) if 1 not in sizes]
    errors = [abs(_multi_ring_ratio(sizes) - 1) for sizes in levels]
    formula = Claim(
        "R9", f"time over the formula, worst of {len(levels)} X x Y x Z", "x", CLOSED_FORM
    )

    two_level = Claim("R9", "4x4x4 over 4x8x2, slow between racks of 8 hosts", "x", VENDOR)
    flat = Claim("R9", "4x4x4 over 4x8x2, all hosts at one switch", "x", VENDOR)
    return [
        formula.close(1 + max(errors), 1.0, 1e-9),
        two_level.between(_cubic_over_long(core_share=1 / 8), 1.01, np.inf),
        flat.between(_cubic_over_long(core_share=1.0), 0.0, 1.0 + 1e-9),
    ]


def _multi_ring_ratio(levels: tuple[int, ...]) -> float:
    """Returns the simulated time divided by DDL's formula, where each level has its own links."""
    shape = levels[::-1]
    topology = grid(shape, wraps=True, bandwidth=1.0, latency=0.0)

    # Each level is slower than the one before it, and further away.
    rates = 100e9 / 4.0 ** np.arange(len(levels))
    latencies = 1e-6 * 3.0 ** np.arange(len(levels))
    level = len(levels) - 1 - axis_of_links(topology)
    links = topology.links._replace(bandwidth=rates[level], latency=latencies[level])
    network = replace(topology, links=links)
    schedule = multi_ring_all_reduce(levels, 64 * UNITS_PER_CHIP)
    seconds = simulate(schedule, network, RESNET_BYTES).seconds

    # T = sum_i 2 (p_i - 1) alpha_i + 2 (p_i - 1) / p_i S / (p_1 ... p_{i-1}) / B_i
    expected = 0.0
    payload = RESNET_BYTES
    for size, rate, latency in zip(levels, rates, latencies, strict=True):
        expected += 2 * (size - 1) * (latency + payload / size / rate)
        payload /= size
    return seconds / expected


def _cubic_over_long(*, core_share: float) -> float:
    """Returns the time of 4x4x4 divided by that of 4x8x2 on 64 GPUs, 4 a host and 8 hosts a rack.

    Args:
        core_share: Bandwidth of the links between racks over that of all hosts of a rack. With 1.0
            all hosts are at one switch.
    """
    # Both factorisations on the same network.
    topology = hosts_in_racks(core_share)
    seconds = []
    for levels in ((4, 4, 4), (4, 8, 2)):
        schedule = multi_ring_all_reduce(levels, 64 * UNITS_PER_CHIP)
        seconds.append(simulate(schedule, topology, RESNET_BYTES).seconds)
    return seconds[0] / seconds[1]


def hosts_in_racks(core_share: float) -> Topology:
    """Returns 2 racks of 8 hosts of 4 GPUs: 300 GB/s in a host, 50 GB/s out of it."""
    gpus = np.arange(64)
    hosts = 64 + gpus // 4
    racks = 80 + np.arange(16) // 8
    if core_share == 1.0:
        racks[:] = 80

    # GPUs to hosts, hosts to racks, and rack to rack.
    lower = [gpus, np.arange(64, 80), np.array([80])]
    upper = [hosts, racks, np.array([81])]
    rates = [300e9, 50e9, 8 * 50e9 * core_share]
    latencies = [1e-6, 2e-6, 2e-6]
    sizes = [len(column) for column in lower]

    # Each link both ways.
    below = np.concatenate(lower)
    above = np.concatenate(upper)
    links = Links(
        source=np.concatenate([below, above]),
        destination=np.concatenate([above, below]),
        bandwidth=np.tile(np.repeat(rates, sizes), 2),
        latency=np.tile(np.repeat(latencies, sizes), 2),
    )
    return Topology("hosts in racks", 64, 82, links)


@REPORTS.register("holes")
def hole_rows() -> list[Row]:
    """Returns F1: the cost of holes for an all-reduce on 512 and 1,024 chips without wrap.

    These holes are at an even row and column in the middle, which is favourable. The cost of all other holes is shown
    on 8 x 8 chips.
    """
    rows = []
    for shape in ((16, 32), (32, 32)):
        for hole in ((2, 2), (2, 4)):
            rows += _rows_of_hole(shape, hole)

    for wraps in (False, True):
        healthy = chips((8, 8), wraps=wraps, latency=1.5e-6)
        for hole in ((2, 2), (1, 1)):
            ratios = hole_ratios(healthy, hole)
            for name, ratio in (("mean", ratios.mean()), ("worst", ratios.max())):
                what = f"{healthy.name}, a hole of {hole[0]} x {hole[1]} anywhere: 102 MB, {name}"
                claim = Claim("F1*", what, "x", PROTOTYPE)
                expectation = f"of {len(ratios)} holes, from {ratios.min():.2f}"
                rows.append(claim.reported(float(ratio), None, expectation))
    return rows


def hole_ratios(healthy: Topology, hole: tuple[int, int]) -> FloatArray:
    """Returns <float64>[holes] the all-reduce time with each hole of a size, over the time without.

    Both are the best that the planner finds.
    """
    ranks = np.arange(healthy.num_ranks).reshape(healthy.shape)
    reach = [0 if wraps else size - 1 for size, wraps in zip(hole, healthy.wraps, strict=True)]
    starts = [range(size - less) for size, less in zip(healthy.shape, reach, strict=True)]

    before = _planned_seconds(healthy, frozenset())
    ratios = []
    for row, column in itertools.product(*starts):
        shifted = np.roll(ranks, (-row, -column), (0, 1))
        dead = frozenset(shifted[: hole[0], : hole[1]].ravel().tolist())
        ratios.append(_planned_seconds(healthy, dead) / before)
    return np.array(ratios)


def _planned_seconds(topology: Topology, dead: frozenset[int]) -> float:
    """Returns the planner's all-reduce of ResNet-50's gradients over all live chips."""
    mesh = MeshConfig(dp_replicate=topology.num_ranks)
    timer = NetworkTimer(Network(topology), place_in_order(mesh, topology), dead)
    gradients = Collective("gradients", "dp_replicate", Kind.ALL_REDUCE, RESNET_BYTES, 1)
    return timer.time(gradients).seconds


def _rows_of_hole(shape: tuple[int, int], hole: tuple[int, int]) -> list[Row]:
    num_chips = shape[0] * shape[1]
    healthy = chips(shape, wraps=False, latency=1.5e-6)
    broken = healthy.without(ranks=interior_hole(shape, hole))
    name = f"{num_chips} chips, an even hole of {hole[0]} x {hole[1]}"

    rows = []
    for payload, model, most in ((RESNET_BYTES, "102 MB", 1.75), (BERT_BYTES, "668 MB", 1.5)):
        # The best of the detours against the whole mesh. One ring has 2 (N - 1) steps: it
        # pays for large payloads only.
        before = _seconds("row_pairs", healthy, payload)
        detours = ["row_pair_clients_2", "row_pair_clients_4"]
        if payload == BERT_BYTES:
            detours.append("neighbour_ring")
        after = min(_seconds(name, broken, payload) for name in detours)
        claim = Claim("F1", f"{name}: {model}, over the healthy time", "x", PROTOTYPE)
        rows.append(claim.between(after / before, 1.0, most))

        if payload == RESNET_BYTES:
            step = _resnet_step(num_chips)
            loss = Claim("F1", f"{name}: loss of ResNet-50's step", "%", PROTOTYPE)
            rows.append(loss.between(100 * (after - before) / step, 0.0, 5.0))
    return rows


def interior_hole(shape: tuple[int, int], hole: tuple[int, int]) -> list[int]:
    """Returns the ranks of a hole in the middle of a grid, at an even row and column."""
    # Aligned to pairs of rows and of columns.
    row = shape[0] // 4 * 2
    column = shape[1] // 4 * 2
    ranks = np.arange(shape[0] * shape[1]).reshape(shape)
    return ranks[row : row + hole[0], column : column + hole[1]].ravel().tolist()


def _seconds(algorithm: str, topology: Topology, payload: float) -> float:
    """Returns the simulated time of an all-reduce by its name."""
    num_units = topology.num_ranks * UNITS_PER_CHIP
    schedule = ALL_REDUCE.get(algorithm).build(topology, num_units)
    return simulate(schedule, topology, payload).seconds


def _resnet_step(num_chips: int) -> float:
    """Returns the logged seconds of a step of ResNet-50."""
    for run in published("resnet_v0.6"):
        if run["chips"] == num_chips:
            return run["block"] / run["steps"]
    raise AssertionError(f"no run of ResNet-50 on {num_chips} chips")
