"""The benchmark of serving at a size of milliseconds; it asserts the length of every answer itself."""

import json

import pytest

from benchmarks.models.model import ModelCase
from benchmarks.models.serving import ServingBenchmark, draw_load, run_serving

TINY = ModelCase(131, 16, 24, 2, 2, 1, input_length=11)


@pytest.mark.slow
def test_the_table_has_a_row_for_every_way_to_serve_a_load(tmp_path, capsys):
    path = tmp_path / "serve.json"
    run_serving(ServingBenchmark([1, 3], 1, path, TINY, num_experts=3, mean_length=5))
    printed = capsys.readouterr().out
    assert "time / continuous" in printed
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    found = {(row["lengths"], row["batch"], row["model"]) for row in rows}
    names = ["ours, continuous", "ours, static", "switch, static", "t5_sdpa, static"]
    names += ["ctranslate2 float32, static", "ctranslate2 int8, static"]
    assert found == {
        (lengths, batch, name)
        for lengths in ("equal", "lognormal")
        for batch in (1, 3)
        for name in names
    }
    for row in rows:
        assert 0 < row["p50_ms"] <= row["p95_ms"]
        assert row["model"] != "ours, continuous" or row["times_faster"] == 1


def test_lognormal_lengths_have_the_given_mean_and_equal_ones_do_not_vary():
    benchmark = ServingBenchmark([1], 1, None, TINY, mean_length=40)
    load = draw_load(benchmark, 4000, "lognormal")
    assert abs(sum(load.lengths) / 4000 - 40) < 2
    assert min(load.lengths) >= 1
    assert max(load.lengths) == 240
    assert len(set(draw_load(benchmark, 50, "equal").lengths)) == 1
    assert {len(row) for row in draw_load(benchmark, 50, "equal").inputs} == {11}
