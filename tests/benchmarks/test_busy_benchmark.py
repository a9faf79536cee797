"""The benchmark of a busy machine, at a size of milliseconds."""

import dataclasses
import json
import os
import time

import pytest

from benchmarks.models import busy
from benchmarks.models.busy import (
    POLICIES,
    SMALL,
    BusyBenchmark,
    busy_processes,
    describe_rows,
    run_busy,
)
from moe import MoEError

TINY = dataclasses.replace(SMALL, vocab_size=131, d_model=32, d_ff=48, num_layers=2, new_tokens=3)


@pytest.mark.slow
def test_all_workers_are_measured_alone_and_beside_others(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")  # which no worker sees
    policies = {"default": POLICIES["default"]}
    monkeypatch.setattr(busy, "POLICIES", policies)
    path = tmp_path / "busy.json"
    run_busy(BusyBenchmark(rounds=1, threads=1, json=path, case=TINY))
    assert "busy / alone" in capsys.readouterr().out
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    keys = [(row["part"], row["policy"]) for row in rows]
    parts = ("training", "decoding")
    assert keys == [(part, policy) for part in parts for policy in policies]
    assert all(row["busy_ms"] > 0 and row["busy_over_alone"] > 0 for row in rows)
    assert [row["alone_over_default"] for row in rows if row["policy"] == "default"] == [1, 1]


def test_ratios_are_of_times_of_one_round():
    rounds = []
    for default in (10.0, 40.0, 20.0):
        times = {}
        for part in ("training", "decoding"):
            times[part, "default", "alone"] = default
            times[part, "default", "busy"] = 9 * default
            times[part, "ours", "alone"] = 1.5 * default
            times[part, "ours", "busy"] = 3 * default
            times[part, "passive", "alone"] = 2 * default
            times[part, "passive", "busy"] = 2 * default
        rounds.append(times)
    ours, passive, default = describe_rows(rounds)[:3]
    assert (ours["alone_ms"], ours["busy_ms"]) == (30, 60)
    assert (ours["busy_over_alone"], ours["alone_over_default"]) == (2, 1.5)
    assert (passive["busy_over_alone"], passive["alone_over_default"]) == (1, 2)
    assert (default["busy_over_alone"], default["alone_over_default"]) == (9, 1)


@pytest.mark.slow
def test_the_busy_processes_take_cores_and_end():
    before = os.times()
    with busy_processes(2):
        time.sleep(1)
    after = os.times()
    assert after.children_user - before.children_user > 0.1


@pytest.mark.slow
def test_a_worker_that_dies_is_an_error(monkeypatch):
    monkeypatch.setattr(busy, "worker_arguments", lambda *_: ["false"])
    with pytest.raises(MoEError, match="that was measured ended with code 1"):
        run_busy(BusyBenchmark(rounds=1, threads=1, json=None, case=TINY))
