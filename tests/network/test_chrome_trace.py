"""A trace has a bar for every transfer, and says when it has not."""

import json

import pytest

from moe.errors import ConfigError
from moe.network.chrome_trace import chrome_trace
from moe.network.rings import ring_all_reduce
from moe.network.simulate import Simulation, simulate
from moe.network.topology import grid


def ring_of_five() -> Simulation:
    topology = grid((5,), wraps=True, bandwidth=8.0, latency=0.25)
    return simulate(ring_all_reduce(range(5), 5), topology, 40.0)


def bars(trace: dict, process: int) -> list[dict]:
    return [
        event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == process
    ]


def test_every_transfer_is_a_bar_of_the_rank_that_sends_it() -> None:
    simulation = ring_of_five()
    table = simulation.schedule.transfers

    trace = json.loads(json.dumps(chrome_trace(simulation)))

    shown = bars(trace, 0)
    assert len(shown) == 5 * 8
    assert [bar["tid"] for bar in shown] == table.source.tolist()
    assert [bar["ts"] for bar in shown] == pytest.approx((simulation.start * 1e6).tolist())
    assert {bar["dur"] for bar in shown} == {1.25e6}
    assert {bar["args"]["bytes"] for bar in shown} == {8.0}
    assert trace["otherData"]["shown"] == "all 40 transfers"
    assert trace["otherData"]["seconds"] == simulation.seconds


def test_the_critical_path_has_a_line_of_its_own() -> None:
    simulation = ring_of_five()

    path = bars(chrome_trace(simulation), 1)

    assert len(path) == 8
    assert {bar["cat"] for bar in path} == {"critical"}
    assert path[-1]["ts"] + path[-1]["dur"] == pytest.approx(simulation.seconds * 1e6)


def test_a_trace_that_is_too_long_shows_whole_ranks_and_says_so() -> None:
    trace = chrome_trace(ring_of_five(), max_events=23)

    assert {bar["tid"] for bar in bars(trace, 0)} == {0, 1}
    assert len(bars(trace, 0)) == 16
    assert trace["otherData"]["shown"] == "16 of 40 transfers: those that ranks 0 to 1 send"

    # Of a single rank that does not fit there is the beginning.
    short = chrome_trace(ring_of_five(), max_events=3)
    assert [bar["args"]["step"] for bar in bars(short, 0)] == [0, 1, 2]
    assert short["otherData"]["shown"].endswith("ranks 0 to 0 send, the first of them")


def test_a_trace_without_bars_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_events is 0"):
        chrome_trace(ring_of_five(), max_events=0)


def test_a_schedule_that_sends_nothing_has_an_empty_trace() -> None:
    alone = grid((1,), wraps=False, bandwidth=8.0, latency=0.25)

    assert bars(chrome_trace(simulate(ring_all_reduce([0], 3), alone, 1.0)), 0) == []
