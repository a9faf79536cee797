"""Running ranks do what a schedule promises: exact sums on a torus and around a hole, replicas that
are equal to the bit, and a clear end when a rank is lost.

One start of 16 processes does for all cases; each test looks at its own part of their answers.
"""

import os
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe.errors import DistributedError
from moe.network.algorithms import ALL_REDUCE, ALL_TO_ALL
from moe.network.ranks.row_exchange import ScheduledAllToAll
from moe.network.ranks.scheduled import ScheduledCollective
from moe.network.reduce_scatter import reduce_scatter_of
from moe.network.rings import grid_all_reduce
from moe.network.topology import grid
from tests.distributed.ranks import run_ranks

NUM_UNITS = 96
SIZES = (0, 17, 1003)
HOLE = (1, 2, 5, 6)
NUM_UPDATES = 8


NETWORK = grid((4, 4), wraps=True, bandwidth=1.0, latency=0.0)


def torus():
    return ALL_REDUCE.get("torus").build(NETWORK, NUM_UNITS)


def around_a_hole():
    """Returns the all-reduce of the 12 ranks that a 2 x 2 hole leaves of 4 x 4, and those ranks."""
    network = NETWORK.without(HOLE)
    schedule = ALL_REDUCE.get("row_pair_clients_1").build(network, NUM_UNITS)
    return schedule, network.live_ranks


def payload(rank, size, dtype):
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-(2**60), 2**60, (size,), generator=generator)


def distances(schedule, group, live_ranks):
    """Returns how far the sums are from those of torch, by dtype and size."""
    answer = {}
    for dtype in (torch.int64, torch.float64, torch.bfloat16):
        collective = ScheduledCollective(schedule, group, live_ranks=live_ranks)
        for size in SIZES:
            x = payload(dist.get_rank(), size, dtype)
            theirs = x.to(torch.promote_types(dtype, torch.float32)) if x.is_floating_point() else x
            theirs = theirs.clone()
            dist.all_reduce(theirs, group=group)
            collective.run(x)
            difference = (x - theirs.to(dtype)).abs()
            answer[str(dtype), size] = float(difference.max()) if size else 0.0
    return answer


def is_equal_everywhere(x, group):
    everyone = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, x, group=group)
    return all(torch.equal(x, other) for other in everyone)


def equal_replicas(collective, group):
    """Returns after how many updates the replicas of some weights were equal to the bit."""
    weights = torch.linspace(-1, 1, 1003)
    num_equal = 0
    for step in range(NUM_UPDATES):
        gradient = payload(dist.get_rank() + 16 * step, 1003, torch.float32) * weights
        collective.run(gradient)
        weights -= 0.01 * gradient
        num_equal += is_equal_everywhere(weights, group)
    return num_equal


def summed(schedule, x, group=None, **options):
    """Returns what a schedule makes of a tensor, which stays as it is."""
    result = x.clone()
    ScheduledCollective(schedule, group, **options).run(result)
    return result


def wire_error(group, schedule, live_ranks):
    """Returns the error of a sum that travelled in bfloat16, relative to its largest entry."""
    x = payload(dist.get_rank(), 1003, torch.float32)
    theirs = x.double()
    dist.all_reduce(theirs, group=group)
    ours = summed(schedule, x, group, live_ranks=live_ranks, wire=torch.bfloat16)
    return float((ours - theirs).abs().max() / theirs.abs().max())


class Unrounded(ScheduledCollective):
    """Leaves the owner of a shard the digits that the others do not get."""

    def _round_shared(self, buffer):
        pass


def on_sixteen_ranks(rank, num_ranks):
    schedule, live_ranks = around_a_hole()
    survivors = dist.new_group(live_ranks.tolist())
    answers = {"torus": distances(torus(), None, None)}
    if rank not in HOLE:
        answers["hole"] = distances(schedule, survivors, live_ranks)
        for kind in (ScheduledCollective, Unrounded):
            collective = kind(schedule, survivors, live_ranks=live_ranks, wire=torch.bfloat16)
            answers[kind.__name__] = equal_replicas(collective, survivors)
        answers["wire error"] = wire_error(survivors, schedule, live_ranks)

    # A reduce-scatter leaves each rank its chunk alone.
    scatter = reduce_scatter_of(torus(), np.arange(16))
    x = payload(rank, NUM_UNITS, torch.int64)
    theirs = x.clone()
    dist.all_reduce(theirs)
    ours = summed(scatter, x)
    answers["chunk"] = torch.equal(ours.chunk(16)[rank], theirs.chunk(16)[rank])

    return answers


@pytest.mark.slow
def test_sums_on_a_torus_and_around_a_hole_are_exact_and_equal_everywhere(tmp_path):
    answers = run_ranks(on_sixteen_ranks, 16, tmp_path)

    for rank, answer in enumerate(answers):
        networks = ("torus", "hole") if rank not in HOLE else ("torus",)
        for network in networks:
            for (dtype, size), distance in answer[network].items():
                tolerance = {"torch.int64": 0.0, "torch.float64": 1e-13}
                assert distance <= tolerance.get(dtype, 0.07), (rank, network, dtype, size)
        assert answer["chunk"], rank

    # Of a bfloat16 wire all replicas get the same, and only because the owner rounds too.
    for rank in set(range(16)) - set(HOLE):
        assert answers[rank]["ScheduledCollective"] == NUM_UPDATES, rank
        assert answers[rank]["Unrounded"] < NUM_UPDATES, rank
        assert 1e-5 < answers[rank]["wire error"] < 0.01, rank


def blocks_of_five_ranks(rank, num_ranks):
    ring = grid((num_ranks,), wraps=True, bandwidth=1.0, latency=0.0)
    exchange = ScheduledAllToAll(ALL_TO_ALL.get("ring").build(ring, 2 * num_ranks**2))
    generator = torch.Generator().manual_seed(1)
    for most in (1, 2, 7, 30):
        # Blocks of most sizes, a few of none at all.
        counts = torch.randint(0, most, (num_ranks, num_ranks), generator=generator)
        x = torch.randn(int(counts[rank].sum()), 3)
        theirs = x.new_empty(int(counts[:, rank].sum()), 3)
        dist.all_to_all_single(theirs, x, counts[:, rank].tolist(), counts[rank].tolist())
        (step,) = exchange.route(counts.numpy())
        ours = step.issue(x, reverse=False).wait()
        assert torch.equal(ours, theirs), most

        # No rank has room for the blocks of others that do not pass it.
        assert step.there.num_rows <= counts.sum()
        returned = step.issue(ours, reverse=True).wait()
        assert torch.equal(returned, x), most


@pytest.mark.slow
def test_blocks_of_any_size_arrive_as_torch_brings_them_and_come_back(tmp_path):
    run_ranks(blocks_of_five_ranks, 5, tmp_path)


def with_a_lost_rank(rank, num_ranks, folder):
    """Returns what the others say of a rank that ends in the middle of an exchange."""
    group = dist.new_group(range(num_ranks), timeout=timedelta(seconds=200))
    collective = ScheduledCollective(grid_all_reduce(range(num_ranks), 30), group)
    collective.run(torch.ones(30))
    if rank == 1:
        torch.save(None, folder / "1.pt")
        os._exit(0)

    start = time.monotonic()
    try:
        for _ in range(3):
            collective.run(torch.ones(30))
    except DistributedError as error:
        return str(error), time.monotonic() - start
    return None


@pytest.mark.slow
def test_the_others_hear_of_a_lost_rank_in_time(tmp_path):
    answers = run_ranks(with_a_lost_rank, 3, tmp_path, tmp_path)

    for rank in (0, 2):
        message, seconds = answers[rank]
        assert f"Rank {rank} lost a rank in step" in message
        assert "which it exchanges with ranks" in message
        assert "declares it dead" in message
        assert seconds < 100  # and not when the group's time is up
