"""The simulation of intervals: its samples are what it says, and its counts can be checked by hand."""

import json

import numpy as np
import pytest

from benchmarks.statistics.intervals import (
    IntervalBenchmark,
    IntervalCase,
    Setting,
    draw_sample,
    run_intervals,
    true_score,
)
from eval.scores.metrics import ACCURACY, F1_WITH_INVALID, MATTHEWS

CASE = IntervalCase(chances=(0.98,), rivals=(0.94,), sizes=(31,))


def test_samples_are_right_as_often_as_the_case_says():
    rng = np.random.default_rng(0)
    for grouped in (False, True):
        for chance, rival in ((0.9, 0.7), (0.2, 0.5)):
            setting = Setting(chance, rival, size=10_000, grouped=grouped)
            sample = draw_sample(IntervalCase(), setting, rng)
            targets = np.asarray(sample.targets)
            assert np.mean(targets) == pytest.approx(0.5, abs=0.02)
            assert np.mean(targets == sample.answers) == pytest.approx(chance, abs=0.02)
            assert np.mean(targets == sample.rival_answers) == pytest.approx(rival, abs=0.02)
            num_groups = len(set(sample.groups))
            assert num_groups == 10_000 if not grouped else 1_800 < num_groups < 2_200


def test_answers_of_a_group_share_their_fate():
    sample = draw_sample(IntervalCase(), Setting(0.5, None, 20_000, True), np.random.default_rng(1))
    right = np.asarray(sample.targets) == sample.answers
    groups = np.asarray(sample.groups)
    neighbours = groups[1:] == groups[:-1]
    together = np.corrcoef(right[1:][neighbours], right[:-1][neighbours])[0, 1]
    apart = np.corrcoef(right[1:][~neighbours], right[:-1][~neighbours])[0, 1]
    assert together == pytest.approx(0.3, abs=0.05)
    assert apart == pytest.approx(0, abs=0.05)


def test_the_true_scores_are_those_of_many_examples():
    case = IntervalCase(share=0.2)
    assert true_score(ACCURACY, case, 0.9) == pytest.approx(90)

    # Of 100 examples 18 + 2 of class 1, 72 + 8 of class 0.
    assert true_score(F1_WITH_INVALID, case, 0.9) == pytest.approx(100 * 36 / (36 + 2 + 8))
    matthews = (18 * 72 - 2 * 8) / np.sqrt(20 * 80 * 26 * 74)
    assert true_score(MATTHEWS, case, 0.9) == pytest.approx(100 * matthews)


@pytest.mark.slow
def test_the_table_has_a_row_for_each_metric_and_case(tmp_path, capsys):
    path = tmp_path / "intervals.json"
    run_intervals(IntervalBenchmark(repeats=12, json=path, case=CASE))
    assert "Lowest coverage" in capsys.readouterr().out
    report = json.loads(path.read_text(encoding="utf-8"))
    rows = report["rows"]
    assert len(rows) == 3 * 2 * 2  # metrics; alone and in groups; a score and a difference
    for row in rows:
        assert 0 <= row["coverage"] <= 100
        assert 0 < row["width"] < 200
        if row["rival"] is None:
            # Of 31 answers all are right in half of the samples.
            assert row["percentile"]["coverage"] < 80
            assert row["percentile"]["width"] < row["width"]
            assert row["coverage"] > 60
