"""A benchmark that is interrupted, and continued."""

import json

import pytest

from benchmarks import timing
from benchmarks.cases import CASES, Case
from moe import ConfigError
from scripts.benchmark import main

COMMAND = "layer --cases 0 --variants moe_dropless --device cpu --rounds"


def test_an_interrupted_benchmark_keeps_every_round_and_continues(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(CASES, 0, Case(64, 32, 48, 8, 2))
    path = tmp_path / "layer.json"
    command = [*COMMAND.split(), "3", "--json", str(path)]
    draw_tokens = timing.draw_tokens
    started = []

    def interrupt(variants):
        started.append(None)
        if len(started) == 8:  # the third round of the second group; a first one warms up
            raise KeyboardInterrupt
        draw_tokens(variants)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as interrupted:
        patch.setattr(timing, "draw_tokens", interrupt)
        main(command)
    assert f"5 of 6 rounds were measured; they are in {path}" in interrupted.value.__notes__[0]
    printed = capsys.readouterr()
    assert "bfloat16  forward_backward  moe_dropless" in printed.out
    assert "5/6 [" in printed.err  # beside the time that is left

    saved = json.loads(path.read_text(encoding="utf-8"))
    rounds = [(row["dtype"], row["variant"], row["rounds"]) for row in saved["rows"]]
    variants = ("dense", "moe_dropless")
    assert rounds == [(d, v, n) for d, n in (("float32", 3), ("bfloat16", 2)) for v in variants]

    with pytest.raises(ConfigError, match="incomplete and has rounds 3, but this run has 2"):
        main([*COMMAND.split(), "2", "--json", str(path)])
    main(command)
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["rows"][:2] == saved["rows"][:2]
    assert [row["rounds"] for row in report["rows"]] == [3] * 4

    # A complete report is not continued.
    main([*COMMAND.split(), "1", "--dtypes", "float32", "--json", str(path)])
    report = json.loads(path.read_text(encoding="utf-8"))
    assert [row["rounds"] for row in report["rows"]] == [1, 1]
