"""The benchmark of the exchange in milliseconds; the bytes that must travel are the oracle of those
that do.
"""

import json

import pytest

from benchmarks.cases import CASES, Case
from scripts.benchmark import main

TINY = Case(64, 32, 48, 8, 2)


@pytest.fixture(autouse=True)
def tiny_sizes(monkeypatch):
    monkeypatch.setitem(CASES, 0, TINY)


@pytest.mark.slow
def test_two_ranks_send_the_fewest_bytes_and_the_saved_tables_have_every_row(tmp_path, capsys):
    path = tmp_path / "exchange.json"
    options = "--ranks 2 --cases 0 --rounds 1 --dtypes float32 --device cpu"
    main(["exchange", "--json", str(path), *options.split()])
    report = json.loads(path.read_text(encoding="utf-8"))
    rows = {row["layer"]: row for row in report["rows"]}
    assert set(rows) == {"dropless", "capacity", "static"}
    for name in ("dropless", "capacity"):
        assert rows[name]["row_bytes"] == rows[name]["fewest_bytes"] > 0
        # Each rank tells the other the rows of its 4 experts.
        assert rows[name]["count_bytes"] == 2 * 4 * 8
    slots = 8 * 5 * 2  # E x C x ranks: C is 1.25 x 32 tokens / 8 experts
    assert rows["static"]["row_bytes"] == 4 * slots // 2 * 32 * 4
    # And the number of its slots, since batches may differ in shape.
    assert rows["static"]["count_bytes"] == 2 * 8
    assert rows["static"]["bytes_ratio"] >= 1
    for name in ("dropless", "capacity", "static"):
        assert all(rows[name][key] > 0 for key in ("ms", "one_process_ms", "bare_ms", "over_ideal"))
    assert "/ fewest" in capsys.readouterr().out
