"""Rings keep their promise for any number of ranks and units."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.network.rings import ring_all_reduce, ring_reduce_scatter, two_way_ring_all_reduce
from moe.network.schedule import Schedule, sliced
from tests.oracles.schedule_promise import ScheduleError, verify

RANKS = st.integers(1, 13)
UNITS = st.integers(0, 97)


@given(num_ranks=RANKS, num_units=UNITS)
def test_every_rank_of_a_ring_ends_with_the_sum(num_ranks: int, num_units: int) -> None:
    verify(ring_all_reduce(range(num_ranks), num_units))
    verify(two_way_ring_all_reduce(range(num_ranks), num_units))


@given(num_ranks=RANKS, num_units=UNITS, num_slices=st.integers(1, 5))
def test_slices_sum_what_the_whole_does(num_ranks: int, num_units: int, num_slices: int) -> None:
    def build(size: int) -> Schedule:
        return ring_all_reduce(range(num_ranks), size)

    verify(sliced(build, num_units, num_slices))


@given(num_ranks=RANKS, num_units=UNITS)
def test_a_reduce_scatter_backwards_is_an_all_gather(num_ranks: int, num_units: int) -> None:
    scatter = ring_reduce_scatter(
        range(num_ranks), 0, num_units, num_ranks=num_ranks, num_units=num_units
    )

    verify(scatter)
    verify(scatter.reversed())


def test_a_lost_transfer_is_found_wherever_it_is() -> None:
    whole = ring_all_reduce(range(5), 13)
    num_rows = len(whole.transfers.step)

    for row in range(num_rows):
        rest = whole.transfers.select(np.arange(num_rows) != row)
        with pytest.raises(ScheduleError, match="are not the sum over the ranks"):
            verify(dataclasses.replace(whole, transfers=rest))
