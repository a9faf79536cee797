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
    recipe = yaml.safe_load(inputs["finetune.yaml"].read_text()) | {
        "mixture": {"tasks": list(TASKS)}
    }
    inputs["finetune.yaml"].write_text(yaml.safe_dump(recipe))
    recipes = [
        "--pretrain-config",
        inputs["pretrain.yaml"],
        "--finetune-config",
        inputs["finetune.yaml"],
    ]
    options = [
        "--out",
        out,
        "--data",
        inputs["texts"],
        "--vocab-size",
        MODEL["vocab_size"],
        "--limit",
        31,
        *recipes,
    ]
    done = call(*options)
    assert done.returncode == 0, done.stderr
    tasks = {
        task["task"]: task for task in json.loads((out / "eval/report.json").read_text())["tasks"]
    }
    assert tuple(tasks) == TASKS
    for name, classic in (("unicode_category", set()), ("docstring_summary", {"lead"})):
        names = {row["name"] for row in tasks[name]["systems"]}
        assert (
            names
            == {"pre-trained", "from-scratch", "majority", "naive Bayes", "logistic regression"}
            | classic
        )

    resumed = call(*options, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.count("is complete") == 3
    assert "== 1 Corpus" not in resumed.stdout
