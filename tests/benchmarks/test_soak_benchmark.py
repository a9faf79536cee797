"""The soak of the server with 60 requests; it raises when an answer differs from its request alone."""

import json

import pytest

from benchmarks.models.soak import SoakBenchmark, run_soak


@pytest.mark.slow
def test_every_answer_of_a_server_that_is_started_again_is_that_of_its_request_alone(tmp_path):
    path = tmp_path / "soak.json"
    run_soak(SoakBenchmark(path, requests=60, share=0.1, num_prompts=7))
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["equal"] + report["refused"] + report["left"] == 60
    assert report["equal"] > 30 and report["refused"] and report["left"]
    assert [len(life) for life in report["memory_mb"]] == [10, 10]
