"""Rings, and rings on rings, sum exactly for any sizes, and cost what the closed forms say."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from moe.network.ring_orders import fold
from moe.network.rings import (
    factorisations,
    grid_all_reduce,
    ring_reduce_scatter,
    row_pair_all_reduce,
    torus_all_reduce,
)
from moe.network.routes import find_route
from moe.network.schedule import IntArray, Schedule
from moe.network.simulate import simulate
from moe.network.topology import Topology, grid
from tests.oracles.schedule_promise import ScheduleError, verify

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3)
UNITS = st.integers(0, 61)
RANKS = st.integers(1, 13)
UNIT_LINKS = {"bandwidth": 1.0, "latency": 0.0}


@given(num_ranks=RANKS, num_units=UNITS)
def test_a_reduce_scatter_backwards_is_an_all_gather(num_ranks: int, num_units: int) -> None:
    scatter = ring_reduce_scatter(
        range(num_ranks), 0, num_units, num_ranks=num_ranks, num_units=num_units
    )

    verify(scatter)
    verify(scatter.reversed())


def test_a_lost_transfer_is_found_wherever_it_is() -> None:
    whole = grid_all_reduce(range(5), 13)
    num_rows = len(whole.transfers.step)

    for row in range(num_rows):
        rest = whole.transfers.select(np.arange(num_rows) != row)
        with pytest.raises(ScheduleError, match="are not the sum over the ranks"):
            verify(dataclasses.replace(whole, transfers=rest))


@pytest.mark.parametrize("shape", [(4, 4), (8, 8), (4, 8), (4, 4, 4)])
def test_a_torus_sends_all_but_a_part_over_each_link(shape: tuple[int, ...]) -> None:
    num_ranks = math.prod(shape)
    schedule = torus_all_reduce(np.arange(num_ranks).reshape(shape), 2 * num_ranks)
    network = grid(shape, wraps=True, bandwidth=1.0, latency=0.0)

    assert simulate(schedule, network, 1.0).seconds == pytest.approx(1 - 1 / num_ranks)


@pytest.mark.parametrize("folds", [False, True])
def test_a_mesh_without_wrap_carries_each_byte_twice(folds: bool) -> None:
    shape = (6, 8)
    ranks = np.arange(48).reshape(shape)
    lines = fold(ranks, [False, False]) if folds else ranks
    schedule = torus_all_reduce(lines, 96)

    torus = link_units(torus_all_reduce(ranks, 96), grid(shape, wraps=True, **UNIT_LINKS))
    mesh = link_units(schedule, grid(shape, wraps=False, **UNIT_LINKS))

    assert mesh.max() == 2 * torus.max()


@pytest.mark.parametrize("num_rows", [16, 32])
def test_row_pairs_reach_the_bandwidth_of_a_torus_without_a_wrap(num_rows: int) -> None:
    width = 32
    ranks = np.arange(num_rows * width).reshape(num_rows, width)
    num_pairs = num_rows // 2
    num_units = 4 * width * num_pairs
    schedule = row_pair_all_reduce(ranks, num_units)

    # Around a pair all but a part; across them, in both rows, each byte twice.
    size = 2 * width
    factor = 1 - 1 / size + 4 * (1 - 1 / num_pairs) / size
    loads = link_units(schedule, grid(ranks.shape, wraps=False, **UNIT_LINKS))
    assert loads.max() / num_units == factor
    assert factor <= 1.05
    assert schedule.num_steps == 2 * (size - 1) + 2 * (num_pairs - 1)


def test_levels_cost_what_the_formula_of_ddl_says() -> None:
    levels = (4, 2, 3)
    num_units = 240
    schedule = grid_all_reduce(levelled(levels), num_units)
    units = units_by_pair(schedule)

    # T = sum of 2 (p_i - 1) alpha_i + 2 (p_i - 1) / p_i S / (p_1 ... p_{i-1}) / B_i
    assert schedule.num_steps == sum(2 * (size - 1) for size in levels)
    ranks = np.arange(schedule.num_ranks)
    stride = 1
    for size in levels:
        payload = num_units // stride
        ring = ranks - ranks // stride % size * stride
        is_level = ring[:, None] == ring
        sent = np.where(is_level, units, 0).sum(axis=1)
        assert_array_equal(sent, 2 * payload * (size - 1) // size)
        stride *= size


def test_factorisations_are_all_and_ordered() -> None:
    products = factorisations(12, 2)

    assert products == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    assert len(factorisations(64, 3)) == 28
    assert factorisations(7, 2) == [(1, 7), (7, 1)]


def levelled(levels: Sequence[int]) -> IntArray:
    """Returns the ranks of a cluster with the fastest level first."""
    return np.arange(math.prod(levels)).reshape(levels[::-1])


def units_by_pair(schedule: Schedule) -> IntArray:
    """Returns <int64>[source, destination] the units that are sent between two ranks."""
    table = schedule.transfers
    units = np.zeros((schedule.num_ranks, schedule.num_ranks), np.int64)
    np.add.at(units, (table.source, table.destination), table.high - table.low)
    return units


def link_units(schedule: Schedule, topology: Topology) -> IntArray:
    """Returns <int64>[links] the units that each link carries."""
    units = units_by_pair(schedule)
    load = np.zeros(len(topology.links.source), np.int64)
    for source, destination in np.argwhere(units).tolist():
        load[find_route(source, destination, topology)] += units[source, destination]
    return load
