"""Simulated times are those of the closed forms, and of a simulation that takes unit by unit."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.errors import ConfigError
from moe.network.link_slots import NUM_GAPS
from moe.network.rings import grid_all_reduce
from moe.network.schedule import Schedule, Transfers, intervals, transfers
from moe.network.simulate import simulate
from moe.network.topology import Topology, grid
from tests.oracles.network import simulate_slowly, without_link

BANDWIDTH = 8.0
LATENCY = 0.25
SPEEDS = [[1.0, 2.0, 3.0, 7.0], [3.0]]
NOTHING = intervals(0, 0, 0)


def network(*shape: int, wraps: bool = True) -> Topology:
    return grid(shape, wraps=wraps, bandwidth=BANDWIDTH, latency=LATENCY)


def schedule_of(num_ranks: int, num_units: int, table: Transfers) -> Schedule:
    """Returns a schedule that promises nothing."""
    return Schedule(num_ranks, num_units, table, before=NOTHING, after=NOTHING)


def copies(*rows: tuple[int, int, int, int, int]) -> Transfers:
    """Returns transfers from rows of (step, source, destination, low, high)."""
    return transfers(*np.array(rows).T, adds=False)


@st.composite
def networks(draw: st.DrawFn) -> Topology:
    """Draws a grid whose links differ, some of which have failed; no rank is cut off."""
    shape = draw(st.sampled_from([(2,), (3,), (5,), (7,), (2, 3), (3, 3), (2, 2, 2)]))
    whole = grid(shape, wraps=draw(st.booleans()), bandwidth=1.0, latency=0.0)
    num_links = len(whole.links.source)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    links = whole.links._replace(
        bandwidth=random.choice(draw(st.sampled_from(SPEEDS)), num_links),
        latency=random.choice([0.0, 0.1, 0.5], num_links),
    )
    topology = dataclasses.replace(whole, links=links)

    # One link down leaves a ring in one piece.
    if draw(st.booleans()) and all(whole.wraps) and num_links > 4:
        link = draw(st.integers(0, num_links - 1))
        topology = without_link(topology, link)
    return topology


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Topology, float]:
    """Draws any transfers at all on any grid, and a payload."""
    topology = draw(networks())
    num_units = draw(st.integers(1, 13))
    num_rows = draw(st.integers(0, 29))
    num_ranks = topology.num_ranks
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    source = random.integers(0, num_ranks, num_rows)
    bounds = np.sort(random.integers(0, num_units + 1, (2, num_rows)), axis=0)
    table = transfers(
        step=random.integers(0, draw(st.integers(1, 7)), num_rows),
        source=source,
        destination=(source + random.integers(1, num_ranks, num_rows)) % num_ranks,
        low=bounds[0],
        high=bounds[1],
        adds=True,
    )
    payload_bytes = draw(st.sampled_from([0.0, 1.0, 13.0, 1001.0]))
    return schedule_of(num_ranks, num_units, table), topology, payload_bytes


@given(case=cases())
def test_times_are_those_of_a_simulation_unit_by_unit(
    case: tuple[Schedule, Topology, float],
) -> None:
    simulation = simulate(*case)

    clock = simulate_slowly(*case)
    rows = range(len(simulation.timeline.start))
    expected_start = [clock.start[row] for row in rows]
    expected_finish = [clock.finish[row] for row in rows]

    # A start that is the end of a gap less what is sent in it may be a rounding away from zero.
    rounding = 1e-12 * simulation.seconds
    np.testing.assert_allclose(simulation.timeline.start, expected_start, rtol=1e-12, atol=rounding)
    np.testing.assert_allclose(
        simulation.timeline.finish, expected_finish, rtol=1e-12, atol=rounding
    )
    links = range(len(simulation.link_bytes))
    expected_bytes = [clock.links[link].bytes for link in links]
    np.testing.assert_allclose(simulation.link_bytes, expected_bytes, rtol=1e-12)


@given(case=cases())
def test_the_critical_path_accounts_for_all_of_the_time(
    case: tuple[Schedule, Topology, float],
) -> None:
    simulation = simulate(*case)
    path = simulation.path
    start = simulation.timeline.start[path.rows]
    finish = simulation.timeline.finish[path.rows]

    assert path.latency + path.bandwidth + path.waiting == pytest.approx(simulation.seconds)
    if len(path.rows):
        # Nothing holds up its first row, and its last one is the last of all.
        assert start[0] == 0
        assert finish[-1] == simulation.seconds

    # On links of one speed a message starts after the one that it waits for.
    bandwidth = simulation.topology.links.bandwidth
    if (bandwidth == bandwidth[0]).all():
        assert (np.diff(start) >= 0).all()
        assert min(path.latency, path.bandwidth, path.waiting) >= 0


@given(num_ranks=st.integers(1, 13), num_units=st.integers(1, 5))
def test_a_ring_takes_its_closed_form(num_ranks: int, num_units: int) -> None:
    schedule = grid_all_reduce(range(num_ranks), num_ranks * num_units)
    payload_bytes = 1001.0

    simulation = simulate(schedule, network(num_ranks), payload_bytes)

    # 2 (p - 1) (alpha + S / (p b))
    steps = 2 * (num_ranks - 1)
    expected = steps * (LATENCY + payload_bytes / num_ranks / BANDWIDTH)
    assert simulation.seconds == pytest.approx(expected, rel=1e-12)
    assert simulation.path.latency == pytest.approx(steps * LATENCY)
    assert simulation.path.waiting == 0
    assert len(simulation.path.rows) == steps


def test_messages_on_one_link_go_one_after_the_other() -> None:
    table = copies((0, 0, 1, 0, 3), (0, 0, 1, 3, 5), (0, 1, 0, 5, 7))
    simulation = simulate(schedule_of(3, 8, table), network(3), 64.0)

    # 24 and 16 bytes at 8 bytes a second; the way back is another link.
    assert simulation.timeline.start.tolist() == [0.0, 3.0, 0.0]
    assert simulation.timeline.finish.tolist() == [3.0 + LATENCY, 5.0 + LATENCY, 2.0 + LATENCY]
    assert simulation.link_bytes.max() == 40.0
    assert simulation.link_busy_seconds.max() == 5.0

    # The second message waits for the link, not for data.
    assert simulation.path.rows.tolist() == [0, 1]
    assert simulation.path.waiting == 3.0
    assert simulation.path.bandwidth == 2.0
    assert simulation.path.latency == LATENCY


def test_a_link_forgets_the_oldest_of_many_gaps() -> None:
    # Link 1 > 2 is busy for half of the time, as what it carries comes over a link of half its
    # speed: a gap before every message. Then short messages of a last step fill the gaps.
    num_messages = NUM_GAPS + 3
    line = network(3, wraps=False)
    is_first = line.links.source == 0
    links = line.links._replace(
        bandwidth=np.where(is_first, BANDWIDTH / 2, BANDWIDTH), latency=np.zeros(len(is_first))
    )
    unit = np.arange(num_messages)
    table = transfers(
        step=np.concatenate([unit, unit + 1, np.full(num_messages, 2 * num_messages)]),
        source=np.repeat([0, 1, 1], num_messages),
        destination=np.repeat([1, 2, 2], num_messages),
        low=np.concatenate([unit, unit, unit + num_messages]),
        high=np.concatenate([unit, unit, unit + num_messages]) + 1,
        adds=False,
    )
    schedule = schedule_of(3, 2 * num_messages, table)
    topology = dataclasses.replace(line, links=links)

    simulation = simulate(schedule, topology, 2 * num_messages * BANDWIDTH)

    # Gap i is from 2 i + 1 to 2 i + 2, but for the first one, from 0 to 2; three are forgotten.
    filled = simulation.timeline.start[-num_messages:]
    end = 2.0 * num_messages + 1.0
    expected = [2.0 * index + 1.0 for index in range(3, num_messages)]
    assert filled.tolist() == [*expected, end, end + 1.0, end + 2.0]


def test_a_dead_rank_is_gone_around() -> None:
    topology = network(3, 3, wraps=False).without(ranks=[4])
    simulation = simulate(schedule_of(9, 1, copies((0, 3, 5, 0, 1))), topology, 8.0)

    # 3 -> 5 crosses four links around the middle, not two.
    assert simulation.seconds == 1.0 + 4 * LATENCY


def test_ranks_that_cannot_be_reached_are_refused() -> None:
    schedule = grid_all_reduce(range(3), 3)

    with pytest.raises(ConfigError, match="no path left from rank"):
        simulate(schedule, network(3).without(ranks=[1]), 1.0)
