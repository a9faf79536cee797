"""Scores by hand, baselines on separable data, reports without a model."""

import json

from eval.baselines import baseline_outputs
from eval.intervals import accuracy, accuracy_by_class
from eval.report import compare_models, write_reports
from eval.run import score_row


def test_accuracy_and_its_interval_by_hand():
    score = accuracy(["a", "b", "b", "b"], ["a", "a", "b", "b"], ["1", "2", "3", "4"])
    assert score.mean == 0.75
    assert 0 <= score.low < 0.75 < score.high <= 1


def test_the_interval_is_one_point_when_all_groups_are_alike():
    score = accuracy(["a", "b"] * 50, ["a", "a"] * 50, [str(i // 2) for i in range(100)])
    assert score == (0.5, 0.5, 0.5)


def test_the_interval_widens_when_neighbours_share_their_fate():
    outputs, targets = ["a"] * 50 + ["b"] * 50, ["a"] * 100
    alone = accuracy(outputs, targets, [str(i) for i in range(100)])
    grouped = accuracy(outputs, targets, [str(i // 10) for i in range(100)])
    assert grouped.high - grouped.low > 2 * (alone.high - alone.low)


def test_the_interval_covers_the_truth_about_95_times_in_100():
    import numpy as np

    rng, covered = np.random.default_rng(0), 0
    for _ in range(200):
        outputs = np.where(rng.random(100) < 0.7, "a", "b").tolist()
        score = accuracy(outputs, ["a"] * 100, [str(i) for i in range(100)])
        covered += score.low <= 0.7 <= score.high
    assert 180 <= covered <= 199


def test_accuracy_by_class_counts():
    assert accuracy_by_class(["a", "b", "b"], ["a", "a", "b"]) == {"a": (1, 2), "b": (1, 1)}


def test_baselines_learn_separable_words_and_majority_counts(task):
    examples = task.examples("train")
    outputs = baseline_outputs(task, examples, examples)
    assert set(outputs["majority"]) == {"red"}
    for name in ("naive Bayes", "logistic regression"):
        assert outputs[name] == [example.targets for example in examples]


def test_a_report_needs_no_model_and_says_whether_intervals_overlap(task, tmp_path):
    examples = task.examples("test")
    right = [example.targets for example in examples]
    wrong = ["nonsense"] * len(examples)
    rows = [score_row(task, examples, right, "ours", "rank"), score_row(task, examples, wrong, "other", "rank")]
    assert rows[1]["num_unparsable"] == len(examples)
    assert "+100.0 points" in compare_models(rows)[0]
    assert "do not overlap" in compare_models(rows)[0]
    assert "no difference is shown" in compare_models([rows[0], {**rows[0], "name": "twin"}])[0]
    section = {
        "task": "colour",
        "version": 1,
        "description": "Colours | things.",
        "licence": "CC0-1.0",
        "split": "test",
        "num_examples": 25,
        "num_groups": 5,
        "num_train": 25,
        "systems": rows,
        "per_class": [{"target": "red", "right": 1, "total": 2}],
        "mistakes": [{"id": "x", "inputs": "a|b", "target": "red", "output": ""}],
    }
    write_reports({"command": "python -m eval", "models": {"ours": "a"}, "tasks": [section]}, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["tasks"][0]["systems"][0]["accuracy"] == 1.0
    text = (tmp_path / "report.md").read_text()
    assert "| ours | rank | 100.0 % | 100.0 to 100.0 | 0 |" in text
    assert "a\\|b" in text
    assert not list(tmp_path.glob(".*"))
