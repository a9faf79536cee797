"""python -m eval as a user calls it."""

import json
import re
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from eval.__main__ import advice_after_interrupt, main
from moe.cli import run_main
from moe.files import KIND_FILE
from tests.models.tiny import tiny_model
from tests.processes import Command, run_command, start_torchrun


def call(*arguments):
    return run_command("eval", *arguments)


@pytest.mark.slow
def test_run_evaluates_two_models_beside_the_baselines_and_compare_reads_them(folders, tmp_path):
    models = ["--model", f"ours={folders['moe']}", "--also", f"t5={folders['t5']}"]
    done = call(
        "run",
        *models,
        "--tasks",
        "unicode_category",
        "--limit",
        "61",
        "--out",
        str(tmp_path / "run"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "run/report.json").read_text())
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
    assert all(30 < row["num_examples"] <= 61 for row in rows)
    assert rows[5]["scores"][0]["value"] > rows[4]["scores"][0]["value"]
    assert {"encoder", "decoder"} == set(rows[0]["router"])
    assert rows[2]["router"] is None
    for kind in ("json", "md", "html"):
        assert str(tmp_path / f"run/report.{kind}") in done.stdout
    assert report["settings"]["limit"] == 61
    assert report["models"]["t5"]["parameters"] > 0

    done = call(
        "compare",
        f"ours={tmp_path}/run",
        f"t5={tmp_path}/run",
        "--mode",
        "rank",
        "--out",
        str(tmp_path / "c"),
    )
    assert done.returncode == 0, done.stderr
    assert "## unicode_category by rank" in done.stdout
    assert "by generate" not in done.stdout
    assert (tmp_path / "c/compare.md").read_text() in done.stdout
    assert (
        json.loads((tmp_path / "c/compare.json").read_text())["tasks"][0]["num_examples"]
        == rows[0]["num_examples"]
    )


@pytest.mark.slow
def test_a_task_that_fails_is_said_at_the_end_and_the_exit_code_is_1(folders, tmp_path):
    asked = [
        "--model",
        str(folders["t5"]),
        "--tasks",
        "rte,unicode_category",
        "--limit",
        "5",
        "--modes",
        "rank",
    ]
    done = call("run", *asked, "--data", str(tmp_path / "nowhere"), "--out", str(tmp_path / "run"))
    assert done.returncode == 1, done.stderr
    assert re.search(r"error: rte failed: There is no folder .*nowhere/rte", done.stderr)
    assert "Traceback" not in done.stderr
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert [task["task"] for task in report["tasks"]] == ["unicode_category"]
    assert [one["task"] for one in report["failed"]] == ["rte"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--model", "no", "--tasks", "unicode_category"], "no holds no model"),
        (["run", "--model", "no", "--tasks", "unicode_categry"], "Did you mean 'unicode_category'"),
        (
            ["run", "--model", "no", "--tasks", "unicode_category", "--modes", "guess"],
            "no mode 'guess'",
        ),
        (
            ["run", "--model", "no", "--tasks", "unicode_category", "--limit", "0"],
            "--limit is 0; expected an integer of at least 1",
        ),
        (["run", "--model", "no", "--tasks", "unicode_category", "--modes", ""], "--modes is ''"),
        (
            ["run", "--model", "no", "--tasks", "unicode_category", "--modes", "rank,"],
            "--modes is 'rank,'",
        ),
        (
            ["run", "--model", "no", "--tasks", "unicode_category", "--limit", "-1"],
            "--limit is -1; expected",
        ),
        (
            ["run", "--model", "no", "--tasks", "unicode_category", "--limit", "many"],
            "--limit is 'many'; expected",
        ),
        (
            ["run", "--model", "no", "--tasks", "unicode_category", "--ep", "0"],
            "--ep is 0; expected an integer of",
        ),
        (
            ["run", "--model", "no", "--tasks", "unicode_category", "--tp", "-1"],
            "--tp is -1; expected an integer of",
        ),
        (
            ["run", "--model", "no", "--tasks", "unicode_category", "--timeout", "nan"],
            "--timeout is nan; expected a",
        ),
        (
            ["run", "--model", "no", "--tasks", "unicode_category", "--timeout", "inf"],
            "--timeout is inf; expected a",
        ),
        (
            ["run", "--model", "no", "--tasks", "unicode_category", "--timeout", "1e308"],
            "--timeout is 1e+308; expected",
        ),
        (
            ["run", "--model", "no", "--tasks", "unicode_category", "--data", ""],
            "--data is ''; expected a path",
        ),
        (
            ["run", "--model", "no", "--tasks", "unicode_category", "--revision", ""],
            "--revision is empty",
        ),
        (["run", "--model", "no", "--tasks", ""], "--tasks is '', in which a name is empty"),
        (
            ["run", "--model", "flan.b=x", "--also", "b=y", "--tasks", "anli_r1,anli_r1.flan"],
            "would be one file",
        ),
        (["compare", "no", "no", "--tasks", ""], "--tasks is ''"),
        (["compare", "", "no"], "names no run with a report.json"),
        (["compare", "=a", "no"], "'=a' is empty, or names no run"),
        (["harness", "", "--model", "no"], "TASKS is ''"),
        (
            ["harness", "a", "--model", "no", "--batch-size", "0"],
            "--batch-size is 0; expected an integer of",
        ),
        (["run", "--model", "=no", "--tasks", "unicode_category"], "'=no' names no model"),
        (
            ["run", "--model", "runs/lr=3/model", "--tasks", "unicode_category"],
            "runs/lr=3/model holds no model",
        ),
        (
            ["run", "--model", "a", "--also", "model=b", "--tasks", "rte"],
            "Two models are called 'model'",
        ),
        (["compare", "no", "no"], "There is no report.json in no"),
    ],
)
def test_a_wrong_argument_is_one_message_and_exit_code_2(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["eval", *arguments, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        run_main(main)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command", ["run --model m --tasks copa", "compare a b", "harness t --model m"]
)
def test_an_empty_folder_for_reports_is_refused(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["eval", *command.split(), "--out", ""])
    with pytest.raises(SystemExit):
        run_main(main)
    assert "--out is empty" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["compare a b", "harness t --model m"])
@pytest.mark.parametrize("name", [KIND_FILE, "corpus.json", "model.safetensors"])
def test_results_are_not_mixed_with_something_else(command, name, tmp_path, monkeypatch, capsys):
    (tmp_path / name).write_text("training run", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["eval", *command.split(), "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        run_main(main)
    assert "would be mixed with it. Choose another --out" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_only_a_run_goes_on_after_it_was_stopped():
    assert (
        advice_after_interrupt(["run", "--model", "m"])
        == "The same command goes on: answers that it wrote are kept."
    )
    for command in ("compare", "harness", "list"):
        assert "goes on" not in advice_after_interrupt([command])
        assert "--resume" not in advice_after_interrupt([command])


@pytest.mark.slow
def test_ctrl_c_is_one_line_at_any_moment_of_a_command(tmp_path):
    """While it starts, and while it imports: the exit code says that it was interrupted."""
    codes = []
    for seconds in (0.1, 0.4, 1.0):
        command = Command(
            "eval", ["harness", "no_task", "--model", "none", "--out", tmp_path / "x"]
        )
        end = time.monotonic() + seconds
        command.wait_for(lambda end=end: time.monotonic() > end)
        command.send_signal(signal.SIGINT)
        ended = command.finish()
        assert "Traceback" not in ended.stderr
        assert "--resume" not in ended.stderr
        if ended.returncode == 130:
            assert ended.stderr.strip().startswith("Interrupted")
        codes.append(ended.returncode)
    assert codes[0] == 130


def torchrun(num_ranks, *arguments):
    return start_torchrun(num_ranks, "eval", *arguments).finish()


def real_torchrun(num_ranks, *arguments):
    """Starts torchrun and each rank in an interpreter of its own, as a user does."""
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
        "-m",
        "eval",
    ]
    return subprocess.run(
        [sys.executable, *launcher, *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def calibrations(report):
    """Takes the calibration of ranked answers out of a report."""
    numbers = []
    for system in report["tasks"][0]["systems"]:
        calibration = system.pop("calibration", None)
        if calibration is not None:
            numbers.append([calibration["ece"], calibration["brier"]])
    assert len(numbers) == 1
    return numbers


@pytest.mark.slow
def test_four_ranks_report_what_one_process_reports(folders, tokenizer, tmp_path):
    tiny_model(num_experts=8, num_heads=4, d_ff=34, eval_capacity_factor=0.5).save_pretrained(
        tmp_path / "model"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    asked = [
        "run",
        "--model",
        str(tmp_path / "model"),
        "--tasks",
        "unicode_category",
        "--limit",
        "71",
        "--capacity-factor",
        "0.75",
    ]
    spread = [*asked, "--ep", "2", "--tp", "2", "--timeout", "60"]
    for num_ranks, arguments, out in ((1, asked, "one"), (4, spread, "four")):
        start = call if num_ranks == 1 else partial(torchrun, num_ranks)
        done = start(*arguments, "--out", str(tmp_path / out))
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("unicode_category  model") == 2
    one, four = (
        json.loads((tmp_path / out / "report.json").read_text()) for out in ("one", "four")
    )

    # Ranks add in another order, which moves the last digits of probabilities.
    for alone, spread_out in zip(calibrations(one), calibrations(four), strict=True):
        assert spread_out == pytest.approx(alone, rel=1e-4)
    assert four["tasks"] == one["tasks"]
    assert four["command"].startswith("torchrun --nproc-per-node 4 -m eval run")
    one, four = (
        (tmp_path / out / "predictions/unicode_category.model.generate.jsonl")
        for out in ("one", "four")
    )
    assert four.read_bytes() == one.read_bytes()


@pytest.mark.slow
def test_a_mesh_that_does_not_fit_is_one_message_for_all_ranks(folders, tmp_path):
    model = ["--model", str(folders["moe"]), "--tasks", "unicode_category", "--out", str(tmp_path)]
    done = real_torchrun(2, "run", *model, "--ep", "2")
    assert done.returncode != 0
    assert done.stderr.count("7 experts cannot be spread evenly over ep 2") == 1
    codes = re.findall(r"exitcode *: (-?\d+)", done.stderr)
    assert "2" in codes
    assert set(codes) <= {"2", "-15"}  # torchrun ends the others when it sees the first end
    assert "eval/__main__.py" not in done.stderr  # no traceback of ours
