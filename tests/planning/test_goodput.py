"""Goodput of each way to survive failures, by hand and beside published numbers."""

import pytest

from moe import ConfigError
from moe.commands import plan
from moe.distributed.mesh import MeshConfig
from moe.planning.goodput import (
    FailureCosts,
    parse_duration,
    show_duration,
    show_survivals,
    survivals,
)

HOUR = 3600.0


def test_a_full_restart_of_llama_3_may_cost_eighteen_minutes_at_ninety_percent():
    # Llama 3 (arXiv:2407.21783): 419 failures in 54 days of 16,384 GPUs, more than 90 % effective.
    mtbf = 54 * 24 * HOUR / 419
    mesh = MeshConfig(dp_replicate=1, dp_shard=16_384)
    costs = FailureCosts(mtbf, restart=8 * 60, checkpoint=20 * 60, stall=10, heal=30)
    (restart,) = survivals(mesh, costs)
    assert restart.goodput == pytest.approx(0.90, abs=0.005)
    assert survivals(mesh, costs._replace(mtbf=50))[0].goodput == 0
    text = show_survivals(mesh, costs, [restart])
    assert "16,384 ranks with a failure every 3 h 6 min (a device fails every 50,6" in text


def test_each_way_to_survive_costs_what_is_idle_and_what_is_missing():
    costs = FailureCosts(mtbf=1000, restart=100, checkpoint=60, stall=4, heal=6)
    restart, constant, shrink, spare = survivals(MeshConfig(dp_replicate=5), costs)
    assert restart.goodput == pytest.approx(1 - (100 + 30) / 1000)

    # Of five shares one group has two: steps take twice as long while one is away.
    assert constant.goodput == pytest.approx(1 - (10 + 50) / 1000)
    assert shrink.goodput == pytest.approx(1 - (10 + 20) / 1000)
    assert spare.goodput == pytest.approx((1 - 10 / 1000) * 5 / 6)


def test_durations_are_read_and_shown_in_the_units_that_people_use():
    texts = ("3h", "18min", "18 m", "0.5s", "2d")
    read = [parse_duration("--mtbf", text) for text in texts]
    assert read == [10_800, 1080, 1080, 0.5, 172_800]
    for text in ("3", "0s", "-1h", "3 weeks", "1e3s", "", "\u0663h", "3 h 5 min"):
        with pytest.raises(ConfigError, match=r"--mtbf is .*a time above 0 with a unit"):
            parse_duration("--mtbf", text)
    shown = [show_duration(seconds) for seconds in (0.0, 59.999, 61, 3599.9, 7500, 1e7)]
    assert shown == ["0.00 s", "1 min 0 s", "1 min 1 s", "1 h 0 min", "2 h 5 min", "2,777 h 47 min"]


def test_the_planner_compares_the_ways(capsys):
    arguments = ["--preset", "st-moe-base", "--training.batch_size", "128", "--mtbf", "3h"]
    plan.main([*arguments, "--mesh.dp_replicate", "4"])
    text = capsys.readouterr().out
    for name in ("full restart", "constant work", "shrink", "and a spare"):
        assert name in text

    plan.main(arguments)
    assert "Replica groups need mesh.dp_replicate above 1." in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--mtbf is 'soon'"):
        plan.main([*arguments[:-1], "soon"])
