"""The recipe of SuperGLUE from end to end: the real command, made small, on the fixtures of the
tasks. Oracle: the rows of the fixtures, counted.
"""

import json
from pathlib import Path

import pytest

import stmoe
from stmoe_eval.dev_scores import read_tasks
from stmoe_eval.scores.metrics import MULTIRC_F1A
from tests.training.test_finetune_mixture import eval_lines, inputs  # noqa: F401  a fixture

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "eval" / "fixtures"
RECIPE = ROOT / "recipes" / "st_moe_base_superglue.yaml"
SMALL = {
    "training.steps": 2,
    "training.batch_size": 4,
    "training.evaluate_every": 2,
    "training.checkpoint_every": 1,
    "training.log_every": 1,
    "training.held_out_batches": 1,
    "data.inputs_length": 96,
    "optim.warmup_steps": 2,
}
TASKS = ["boolq", "cb", "copa", "multirc", "record", "rte", "wic", "wsc"]


def test_training_has_an_example_for_each_answer_of_record_and_the_right_referents_of_wsc_alone():
    rows = {}
    for name in ("record", "wsc", "dpr"):
        lines = (FIXTURES / name / "train.jsonl").read_text().splitlines()
        rows[name] = [json.loads(line) for line in lines]
    data = read_tasks(["record", "wsc", "dpr"], str(FIXTURES))
    num_answers = sum(len(row["answers"]) for row in rows["record"])
    assert len(data.train["record"]) == num_answers > len(rows["record"])
    num_right = sum(row["label"] for row in rows["wsc"])
    assert len(data.train["wsc"]) == num_right < len(rows["wsc"])
    assert len(data.train["dpr"]) == len(rows["dpr"])
    assert data.dev.keys() == {"record", "wsc"}


@pytest.mark.slow
def test_the_recipe_trains_and_reports_every_task(inputs, tmp_path):  # noqa: F811
    words = ["--config", RECIPE, "--pretrained", inputs["model"], "--out", tmp_path / "run"]
    words += ["--mixture.folder", FIXTURES, "--seeds", 1]
    words += [f"--{name}={value}" for name, value in SMALL.items()]
    stmoe.main(["finetune", *map(str, words)])

    last = eval_lines(tmp_path / "run/seed-1")[-1]
    scored = {name.split("/")[1] for name in last if name not in ("step", "eval/mean")}
    assert scored == set(TASKS)
    by_task = [[v for n, v in last.items() if n.startswith(f"eval/{task}/")] for task in TASKS]
    assert last["eval/mean"] == pytest.approx(sum(sum(of) / len(of) for of in by_task) / 8)
    assert f"eval/multirc/{MULTIRC_F1A.name}" in last
    text = (tmp_path / "run/summary.md").read_text()
    assert all(name.removeprefix("eval/") in text for name in last if name != "step")
