"""python -m eval as a user calls it."""

import json
import subprocess
import sys

import pytest

from eval.task import TASKS


def call(*arguments):
    command = [sys.executable, "-m", "eval", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_run_evaluates_two_models_beside_the_baselines(folders, tmp_path):
    models = ["--model", f"ours={folders['moe']}", "--also", f"t5={folders['t5']}"]
    done = call("run", *models, "--tasks", "unicode_category", "--limit", "23", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    rows = report["tasks"][0]["systems"]
    assert [(row["name"], row["mode"]) for row in rows] == [
        ("ours", "generate"),
        ("ours", "rank"),
        ("t5", "generate"),
        ("t5", "rank"),
        ("majority", "baseline"),
        ("naive Bayes", "baseline"),
        ("logistic regression", "baseline"),
    ]
    assert all(row["num_examples"] == 23 for row in rows)
    assert rows[5]["accuracy"] > rows[4]["accuracy"]
    assert "report.md" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere", "--tasks", "unicode_category"], "nowhere holds no model"),
        (["--model", "nowhere", "--tasks", "unicode_categry"], "Did you mean 'unicode_category'"),
        (["--model", "nowhere", "--tasks", "unicode_category", "--modes", "guess"], "no mode 'guess'"),
        (["--model", "nowhere", "--tasks", "unicode_category", "--limit", "0"], "--limit is 0; expected at least 1"),
        (["--model", "a", "--also", "model=b", "--tasks", "unicode_category"], "Two models are called 'model'"),
    ],
)
def test_a_wrong_argument_is_one_message_and_exit_code_2(arguments, message, tmp_path):
    done = call("run", *arguments, "--out", str(tmp_path))
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_list_names_every_task():
    done = call("list")
    assert done.returncode == 0
    assert all(name in done.stdout for name in TASKS.names())
