"""The task of names: its examples, its scores, and a run beside the baselines.

Oracles: the names themselves, and letters that Unicode says are the same.
"""

import json

import pytest

import stmoe
from moe.data.names import read_names
from stmoe_eval.task import TASKS

TASK = TASKS.get("names")


def test_answers_and_targets_are_compared_in_one_form():
    """Khmer and Lao have names with zero-width spaces, which one vocabulary writes and another not."""
    examples = TASK.examples("validation")
    names = read_names(split="validation")
    assert [(example.inputs, example.targets, example.group) for example in examples] == [
        (f"{name.language}: {name.english}", name.name, name.english) for name in names
    ]

    targets = [example.targets for example in examples]
    assert TASK.scores(examples, targets) == {"exact_match": 100, "chrf": 100}
    spaced = [
        target.replace("\u200b", " ").replace("\uff08", "(").replace("\uff09", ")")
        for target in targets
    ]
    assert spaced != targets
    assert TASK.scores(examples, spaced)["exact_match"] == 100

    wrong = TASK.scores(examples, [f"{target}s" for target in targets])
    assert wrong["exact_match"] == 0 < wrong["chrf"] < 100


@pytest.mark.slow
def test_a_model_is_evaluated_beside_the_baselines(folders, tmp_path, short_answers):
    words = ["--model", folders["moe"], "--tasks", "names", "--limit", 50]
    words += ["--train-examples", 40_000, "--out", tmp_path]
    stmoe.main(["eval", "run", *map(str, words)])
    (task,) = json.loads((tmp_path / "report.json").read_text())["tasks"]
    assert (task["licence"], task["split"], task["num_available"]) == (
        "Unicode-3.0",
        "test",
        10_161,
    )
    assert task["num_groups"] < task["num_examples"] <= 50

    scores = {}
    for system in task["systems"]:
        assert [score["metric"] for score in system["scores"]] == ["exact_match", "chrf"]
        scores[system["name"]] = system["scores"][0]["value"]
    assert list(scores) == ["model", "copy", "most similar", "nearest prefix"]
    assert scores["nearest prefix"] > scores["copy"] >= scores["model"] == 0
