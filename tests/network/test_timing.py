"""The time of collectives on a network: closed forms, the choice, interpolation, dead ranks."""

import dataclasses

import pytest

from moe.distributed.mesh import MeshConfig
from moe.errors import ConfigError
from moe.network.planner.placement import place_by_tiles, place_in_order
from moe.network.planner.search import estimated_seconds
from moe.network.planner.table import show_network_plan
from moe.network.planner.timing import NetworkTimer
from moe.network.topology import Rate, grid, switch, two_level
from moe.network.topology_file import Network
from moe.planning.plan import build_model, make_plan
from moe.planning.traffic import Collective, Kind
from moe.planning.workload import Workload
from tests.network.test_search import CONFIG

BANDWIDTH = 1e9
LATENCY = 2e-6
TORUS = grid((4, 4), wraps=True, bandwidth=BANDWIDTH, latency=LATENCY)
DATA = MeshConfig(dp_replicate=16)
PAYLOAD = 64e6


def call(kind, axis="dp_replicate", payload=PAYLOAD, num_calls=1):
    return Collective("gradients", axis, kind, payload, num_calls)


def timer_of(topology, mesh, dead=(), tiles=None):
    network = Network(topology)
    if tiles is None:
        return NetworkTimer(network, place_in_order(mesh, topology), dead)
    return NetworkTimer(network, place_by_tiles(mesh, topology, tiles), dead)


def test_a_large_all_reduce_on_a_torus_uses_all_links_all_the_time():
    timed = timer_of(TORUS, DATA).time(call(Kind.ALL_REDUCE))
    # Of four links a rank sends 2 (1 - 1/16) of the payload at least.
    least = 2 * 15 / 16 * PAYLOAD / (4 * BANDWIDTH)
    assert least <= timed.timing.seconds <= 1.1 * least
    assert timed.algorithm == "torus_all_axes"


def test_a_small_all_reduce_takes_the_steps_of_its_schedule():
    timed = timer_of(TORUS, DATA).time(call(Kind.ALL_REDUCE, payload=16.0))
    assert timed.timing.seconds == pytest.approx(timed.candidates[0].steps * LATENCY, rel=0.01)
    assert timed.timing.latency > 0.99 * timed.timing.seconds


def test_the_best_of_all_that_were_simulated_is_chosen():
    mesh = grid((4, 6), wraps=False, bandwidth=1e9, latency=1e-6)
    timer = timer_of(mesh, MeshConfig(dp_shard=24))
    timed = timer.time(call(Kind.REDUCE_SCATTER, axis="dp_shard"))
    times = [one.timing.seconds for one in timed.candidates if one.timing is not None]
    assert times == sorted(times)
    assert timed.timing.seconds == times[0]
    others = [one for one in timed.candidates if one.timing is None]
    assert all(one.estimate >= times[0] for one in others)
    for one in timed.candidates:
        exact = timer.simulate(timed.collective, one.name).seconds
        assert timed.timing.seconds <= exact * (1 + 1e-12), one.name  # no winner was left out
        assert one.bound <= exact


def test_a_gather_takes_as_long_as_the_scatter_that_it_is_backwards():
    timer = timer_of(TORUS, DATA)
    gather, scatter, whole = (
        timer.time(call(kind)).timing.seconds
        for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
    )
    assert gather == scatter
    assert gather + scatter == pytest.approx(whole, rel=0.05)


def test_a_direct_exchange_at_a_switch_takes_what_each_rank_sends():
    topology = switch(8, Rate(BANDWIDTH, LATENCY))
    timed = timer_of(topology, MeshConfig(ep=8)).time(call(Kind.ALL_TO_ALL, axis="ep"))
    sent = call(Kind.ALL_TO_ALL, axis="ep").sent_bytes(MeshConfig(ep=8))
    assert sent == PAYLOAD / 8 * 7 / 8
    assert timed.timing.seconds == pytest.approx(sent / BANDWIDTH, rel=0.02)


@pytest.mark.parametrize("stride", [1, 4])
def test_rings_that_hop_over_others_share_their_links(stride):
    ring = grid((16,), wraps=True, bandwidth=BANDWIDTH, latency=0.0)
    mesh = MeshConfig(dp_replicate=16 // stride, tp=stride)
    size = 16 // stride
    timed = timer_of(ring, mesh).time(call(Kind.ALL_REDUCE))
    least = 2 * (size - 1) / size * PAYLOAD / (2 * BANDWIDTH) * stride
    assert timed.timing.seconds == pytest.approx(least, rel=0.01)
    assert timed.num_simulated == 1


def test_payloads_between_two_others_are_interpolated_within_a_few_percent():
    payloads = [1e5 * 2**power for power in range(5)]
    timer = timer_of(TORUS, DATA)
    plan = timer.plan([call(Kind.ALL_REDUCE, payload=payload) for payload in payloads])
    for part in plan.parts:
        exact = timer.simulate(part.collective, part.algorithm).seconds
        assert part.timing.seconds == pytest.approx(exact, rel=0.05)
    first = plan.parts[0]
    assert first.timing.seconds == timer.simulate(first.collective, first.algorithm).seconds


def test_more_bandwidth_is_never_slower_and_less_latency_neither():
    def seconds(topology):
        return timer_of(topology, DATA).time(call(Kind.ALL_REDUCE, payload=1e6)).timing.seconds

    links = TORUS.links
    faster = dataclasses.replace(TORUS, links=links._replace(bandwidth=links.bandwidth * 1.5))
    nearer = dataclasses.replace(TORUS, links=links._replace(latency=links.latency / 1.5))
    assert seconds(faster) <= seconds(TORUS)
    assert seconds(nearer) <= seconds(TORUS)


# ---------------------------------------------------------------------------
# Dead ranks


def test_a_hole_costs_time_and_the_survivors_sum_around_it():
    mesh = grid((4, 4), wraps=False, bandwidth=BANDWIDTH, latency=LATENCY)
    whole = timer_of(mesh, DATA).time(call(Kind.ALL_REDUCE))
    timer = timer_of(mesh, DATA, dead=[5, 6, 9, 10])
    broken = timer.time(call(Kind.ALL_REDUCE))
    assert whole.timing.seconds < broken.timing.seconds < 4 * whole.timing.seconds
    table = timer.simulate(call(Kind.ALL_REDUCE), broken.algorithm).schedule.transfers
    assert not {5, 6, 9, 10} & set(table.source.tolist() + table.destination.tolist())


def test_groups_that_all_lose_all_but_one_rank_are_refused():
    timer = timer_of(switch(4, Rate(1e9, 0.0)), MeshConfig(dp_replicate=2, tp=2), dead=[0, 2])
    with pytest.raises(ConfigError, match="No group over tp has two live ranks left"):
        timer.time(call(Kind.ALL_REDUCE, axis="tp"))


def test_ranks_that_cannot_be_reached_are_refused():
    line = grid((3,), wraps=False, bandwidth=BANDWIDTH, latency=LATENCY)
    with pytest.raises(ConfigError, match=r"No all-reduce can be built|no path left"):
        timer_of(line, MeshConfig(dp_replicate=3), dead=[1]).time(call(Kind.ALL_REDUCE))


# ---------------------------------------------------------------------------
# The formula


def test_the_formula_is_the_closed_form_of_two_levels():
    inside = Rate(8e9, 1e-6)
    across = Rate(1e9, 5e-6)
    topology = two_level(4, 8, inside=inside, across=across)
    placement = place_in_order(MeshConfig(dp_replicate=32), topology)
    groups = placement.groups("dp_replicate")
    seconds = estimated_seconds(call(Kind.ALL_REDUCE), groups, topology)
    # T = sum of 2 (p - 1) alpha + 2 (p - 1) / p S / B, the payload of the second level an eighth.
    near = 2 * 7 * 1e-6 + 2 * 7 / 8 * PAYLOAD / 8e9
    far = 2 * 3 * 5e-6 + 2 * 3 / 4 * PAYLOAD / 8 / 1e9
    assert seconds == pytest.approx(near + far)


# ---------------------------------------------------------------------------
# Levels


def test_on_a_flat_network_levels_save_steps_and_send_no_more():
    topology = switch(64, Rate(BANDWIDTH, LATENCY))
    timer = timer_of(topology, MeshConfig(dp_replicate=64))
    small = timer.time(call(Kind.ALL_REDUCE, payload=64.0))
    assert small.algorithm == "multi_ring 4x4x4"
    assert small.timing.seconds == pytest.approx(2 * 9 * LATENCY, rel=0.01)
    bounds = {one.name: one.bound for one in timer.time(call(Kind.ALL_REDUCE)).candidates}
    assert bounds["multi_ring 4x4x4"] == pytest.approx(bounds["ring"])


def test_a_plan_on_a_network_assumes_that_checkpointed_blocks_run_again():
    work = Workload(32, 64, 16, activation_checkpointing=True)
    plan = make_plan(build_model(CONFIG), work, MeshConfig(dp_replicate=2))
    topology = switch(2, Rate(1e9, 1e-6))
    network = Network(topology, device_flops=1e12)
    timed = NetworkTimer(network, place_in_order(plan.mesh, topology)).plan(plan.collectives)
    assumed = show_network_plan(plan, timed).partition("assumed\n")[2]
    share = plan.repeated_flops / 2 / plan.flops_per_rank
    assert f"{share:.0%} of the products are repeated: blocks that activation check" in assumed
