"""The benchmark of tracing at a tiny size: a number for each run, and a file that holds them."""

import json

from benchmarks.models.tracing import BASE, TracingBenchmark, run_tracing


def test_every_run_has_a_number_and_the_trace_a_size(tmp_path, capsys):
    sizes = {"d_model": 32, "vocab_size": 50, "inputs_length": 16, "targets_length": 8}
    sizes |= {"num_batches": 2, "batch_size": 4}
    benchmark = TracingBenchmark(rounds=1, json=tmp_path / "tracing.json", **sizes)
    report = run_tracing(benchmark)
    assert json.loads(benchmark.json.read_text()) == report
    assert report["rows"][0]["run"] == BASE
    assert all(row["milliseconds"] > 0 for row in report["rows"])
    assert report["rows"][0]["ratio"] == 1
    assert report["sparse_layers"] == 4

    # Tokens, their ids and their choices in one layer of each stack, but no statistics by token.
    assert 10 < report["megabytes_per_million_tokens"] < 60
    assert "of an evaluation" in capsys.readouterr().out
