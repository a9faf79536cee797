"""The benchmark of the start, on processes that start at once."""

import json

import pytest

from benchmarks.commands import startup
from benchmarks.commands.startup import BASE, MOST, Start, describe_rows, measure_start, starts
from moe import ConfigError, MoEError
from scripts.benchmark import main

BUSY = "x = 0\nfor number in range(3_000_000): x += number"


def test_every_command_is_measured():
    names = set(starts())
    assert {BASE, "import moe", "scripts.demo", "benchmarks.network"} <= names
    assert {"eval run", "stmoe generate"} <= names
    assert "scripts.__init__" not in names  # no command


def test_medians_are_put_over_those_of_the_base():
    base = [Start(2.0, 100.0), Start(4.0, 300.0), Start(3.0, 200.0)]
    rows = describe_rows({BASE: base, "slow": [Start(6.0, 100.0)]})
    assert [row["ratio"] for row in rows] == [1, 2]
    assert [row["memory_ratio"] for row in rows] == [1, 0.5]
    table = startup.format_report(
        {"rows": rows, "device": "here", "threads": 1, "torch": "2", "rounds": 3}
    )
    assert table.count(f"more than {MOST}") == 1


@pytest.mark.slow
def test_the_time_is_that_of_the_process(tmp_path, monkeypatch, capsys):
    quick, busy = ["-c", "pass"], ["-c", BUSY]
    monkeypatch.setattr(startup, "starts", lambda: {BASE: quick, "busy": busy, "other": quick})
    path = tmp_path / "startup.json"
    main(["startup", "--rounds", "3", "--json", str(path), "--only", "busy"])
    assert "busy" in capsys.readouterr().out
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [row["start"] for row in rows] == [BASE, "busy"]
    assert rows[1]["ratio"] > 1.3 and rows[1]["peak_mib"] > 1


@pytest.mark.slow
def test_a_start_that_fails_is_named():
    with pytest.raises(MoEError, match=r"busy ended with code 3\. Run it to see why: .*exit"):
        measure_start("busy", ["-c", "exit(3)"])


def test_a_name_that_nothing_has_is_refused():
    with pytest.raises(ConfigError, match=r"'eval rum'\. Did you mean 'eval run'"):
        main(["startup", "--only", "eval rum"])
