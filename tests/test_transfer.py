"""The comparison with and without pre-training from end to end, at a small size, as a user starts
it.
"""

import json

import pytest
import yaml

from scripts.transfer import TASKS
from tests.processes import run_command
from tests.training.tiny_run import MODEL, write_inputs


def call(*arguments):
    return run_command("scripts.transfer", *arguments)


@pytest.mark.slow
def test_both_tasks_are_reported_with_and_without_pretraining_beside_the_baselines(tmp_path):
    inputs, out = write_inputs(tmp_path), tmp_path / "transfer"
    recipe = yaml.safe_load(inputs["finetune.yaml"].read_text())
    recipe["mixture"] = {"tasks": list(TASKS)}
    inputs["finetune.yaml"].write_text(yaml.safe_dump(recipe))
    options = ["--out", out, "--data", inputs["texts"], "--vocab-size", MODEL["vocab_size"]]
    options += ["--pretrain-config", inputs["pretrain.yaml"], "--limit", 13]
    options += ["--finetune-config", inputs["finetune.yaml"]]
    done = call(*options)
    assert done.returncode == 0, done.stderr
    tasks = json.loads((out / "eval/report.json").read_text())["tasks"]
    assert tuple(task["task"] for task in tasks) == TASKS
    expected = {"pre-trained", "from-scratch", "majority", "naive Bayes", "logistic regression"}
    for task in tasks:
        names = {row["name"] for row in task["systems"]}
        assert names == expected | ({"lead"} if task["task"] == "docstring_summary" else set())

    resumed = call(*options, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.count("is complete") == 3
    assert "== 1 Corpus" not in resumed.stdout
