"""The fault campaign: its report, and one fault for real."""

import json

import pytest

from benchmarks.recovery import faults
from benchmarks.recovery.faults import Campaign, FaultRecord, RunRecord, campaign_table
from moe import ConfigError


def record(ranks=2, *, faults=(), equal=True):
    return RunRecord(5, ranks, list(faults), equal_losses=equal, equal_weights=True)


def kill(lost_steps, stall, damaged=0):
    return FaultRecord("kill", 0, 7, lost_steps, stall, damaged)


def test_the_table_counts_by_ranks_and_kind():
    records = [
        record(faults=[kill(3, 5.0), FaultRecord("slow", 1, 9, 0, 2.0, 0)]),
        record(faults=[kill(0, 2.0, damaged=1)], equal=False),
        record(4, faults=[kill(1, 1.0)]),
    ]
    rows = [line.split() for line in campaign_table(records).splitlines()[1:]]
    assert rows == [
        ["2", "kill", "2", "1.5", "3", "3.5", "1", "1", "of", "2"],
        ["2", "slow", "1", "0.0", "0", "2.0", "0", "1", "of", "1"],
        ["4", "kill", "1", "1.0", "1", "1.0", "0", "1", "of", "1"],
    ]


def test_a_campaign_goes_on_from_its_file_and_not_from_that_of_another(tmp_path):
    target = tmp_path / "faults.json"
    first = Campaign(target, "python -m benchmarks.recovery.faults --seed 0")
    first.add(record(faults=[kill(3, 5.0)]))
    again = Campaign(target, "python -m benchmarks.recovery.faults --seed 0")
    assert again.records == first.records
    assert again.num_faults == 1

    with pytest.raises(ConfigError, match=r"--json is .*the same campaign, .*--seed 1"):
        Campaign(target, "python -m benchmarks.recovery.faults --seed 1")


@pytest.mark.slow
def test_a_rank_that_is_killed_costs_steps_and_changes_nothing(tmp_path, capsys):
    target = tmp_path / "faults.json"
    faults.main(["--faults", "1", "--only", "kill", "--ranks", "2", "--json", str(target)])
    assert "1/1: 2 ranks, 1 kill: as if undisturbed" in capsys.readouterr().out
    (run,) = json.loads(target.read_text())["runs"]
    assert [fault["damaged_checkpoints"] for fault in run["faults"]] == [0]
