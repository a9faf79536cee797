"""stmoe eval as a user calls it."""

import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from itertools import chain

import pytest

import stmoe
from moe.cli import run_main
from moe.files import KIND_FILE
from tests.eval.conftest import THINGS
from tests.eval.rows import FIXTURES
from tests.models.tiny import tiny_model
from tests.processes import Command, run_command, start_torchrun


def call(*arguments):
    return run_command("stmoe", "eval", *arguments)


def write_pairs(path, numbers):
    """Writes a pair for each thing and number, whose words tell its colour."""
    pairs = []
    for number in numbers:
        for thing, colour in THINGS.items():
            pairs.append({"inputs": f"name {'the ' * number}{thing}", "targets": colour})
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


@pytest.fixture
def pairs(tmp_path):
    return write_pairs(tmp_path / "pairs.jsonl", range(5))


@pytest.mark.slow
def test_run_evaluates_two_models_beside_the_baselines_and_compare_reads_them(
    folders, pairs, tmp_path, capsys
):
    run = tmp_path / "run"
    models = ["--model", f"ours={folders['moe']}", "--also", f"t5={folders['t5']}"]
    data = ["--pairs", pairs, "--train-pairs", write_pairs(tmp_path / "train.jsonl", range(5, 9))]
    done = call("run", *models, *data, "--limit", "19", "--out", run)
    assert done.returncode == 0, done.stderr
    report = json.loads((run / "report.json").read_text())
    (task,) = report["tasks"]
    digest = hashlib.sha256(pairs.read_bytes()).hexdigest()[:16]
    assert task["data"]["origin"] == f"{pairs} (SHA-256 {digest})"
    assert "truncated at 512 tokens" in (run / "report.md").read_text()
    rows = task["systems"]
    assert [(row["name"], row["mode"]) for row in rows] == [
        *((name, mode) for name in ("ours", "t5") for mode in ("generate", "rank")),
        *((name, "baseline") for name in ("majority", "naive Bayes", "logistic regression")),
    ]
    assert all(row["num_examples"] == 19 for row in rows)
    assert rows[5]["scores"][0]["value"] > rows[4]["scores"][0]["value"]
    assert {"encoder", "decoder"} == set(rows[0]["router"])
    assert rows[2]["router"] is None
    for kind in ("json", "md", "html"):
        assert str(run / f"report.{kind}") in done.stdout
    assert report["settings"]["limit"] == 19
    assert report["models"]["t5"]["parameters"] > 0

    sides = [f"ours={run}", f"t5={run}", "--mode", "rank", "--out", str(tmp_path / "c")]
    stmoe.main(["eval", "compare", *sides])
    printed = capsys.readouterr().out
    compared = json.loads((tmp_path / "c/compare.json").read_text())
    (metric,) = compared["tasks"][0]["metrics"]
    line, *_, place = printed.splitlines()
    assert line.startswith(f"pairs_labels by rank, accuracy: ours {metric['a']:.1f}, t5 ")
    assert f"{metric['wins']:,} wins" in line and str(tmp_path / "c/compare.md") in place
    assert "## pairs_labels by rank" in (tmp_path / "c/compare.md").read_text()
    assert compared["tasks"][0]["num_examples"] == rows[0]["num_examples"]


@pytest.mark.slow
def test_a_task_that_fails_is_said_at_the_end_and_the_exit_code_is_1(folders, tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/boolq").symlink_to(FIXTURES / "boolq")
    asked = ["--model", folders["t5"], "--tasks", "rte,boolq", "--limit", "5"]
    asked += ["--modes", "rank", "--data", tmp_path / "rows", "--out", tmp_path / "run"]
    done = call("run", *asked)
    assert done.returncode == 1, done.stderr
    assert re.search(r"error: rte failed: There is no folder .*rows/rte", done.stderr)
    assert "Traceback" not in done.stderr
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert [task["task"] for task in report["tasks"]] == ["boolq"]
    assert [one["task"] for one in report["failed"]] == ["rte"]


RUN = ["run", "--model", "no", "--tasks", "boolq"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (RUN, "no holds no model"),
        ([*RUN[:-1], "bolq"], "Did you mean 'boolq'"),
        ([*RUN[:-1], ""], "--tasks is '', in which a name is empty"),
        ([*RUN, "--modes", "guess"], "no mode 'guess'"),
        ([*RUN, "--modes", "rank,"], "--modes is 'rank,'"),
        ([*RUN, "--limit", "0"], "--limit is 0; expected an integer of at least 1"),
        ([*RUN, "--timeout", "nan"], "--timeout is nan; expected a"),
        ([*RUN, "--data", ""], "--data is empty"),
        ([*RUN, "--model", "=no"], "'=no' names no model"),
        ([*RUN, "--model", "runs/lr=3/model"], "runs/lr=3/model holds no model"),
        ([*RUN, "--model", "a", "--also", "model=b"], "Two models have the name 'model'"),
        (
            ["run", "--model", "flan.b=x", "--also", "b=y", "--tasks", "anli_r1,anli_r1.flan"],
            "would go into the same file",
        ),
        (["compare", "no", "no"], "There is no report.json in no"),
        (["compare", "=a", "no"], "'=a' is empty, or names no run"),
    ],
)
def test_a_wrong_argument_is_one_message_and_exit_code_2(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["stmoe", "eval", *arguments, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        run_main(stmoe.main)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not list(tmp_path.iterdir())


def test_results_are_not_mixed_with_something_else(tmp_path, monkeypatch, capsys):
    (tmp_path / KIND_FILE).write_text("training run", encoding="utf-8")
    for out, message in (
        (str(tmp_path), "would be mixed with it. Choose another --out"),
        ("", "--out is empty"),
    ):
        monkeypatch.setattr(sys, "argv", ["stmoe", "eval", "compare", "a", "b", "--out", out])
        with pytest.raises(SystemExit):
            run_main(stmoe.main)
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [KIND_FILE]


@pytest.mark.slow
def test_ctrl_c_is_one_line_at_any_moment_of_a_command(folders, pairs, tmp_path):
    """While it starts, and while it works: the exit code says that it was interrupted."""
    codes = []
    for seconds in (0.1, 0.7):
        options = {"--pairs": pairs, "--model": folders["moe"], "--out": tmp_path / "x"}
        arguments = ["run", *chain.from_iterable(options.items())]
        command = Command("stmoe", ["eval", *arguments])
        end = time.monotonic() + seconds
        command.wait_for(lambda end=end: time.monotonic() > end)
        command.send_signal(signal.SIGINT)
        ended = command.finish()
        assert "Traceback" not in ended.stderr
        assert "--resume" not in ended.stderr
        if ended.returncode == 130:
            last = ended.stderr.splitlines()[-1]
            assert last.startswith("Interrupted")
            assert "The same command continues" in last
        codes.append(ended.returncode)
    assert codes[0] == 130


def real_torchrun(num_ranks, *arguments):
    """Starts torchrun and each rank in an interpreter of its own, as a user does."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(num_ranks), "-m", "stmoe", "eval"]
    command = [*launcher, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


def take_calibration(report):
    """Takes the calibration of ranked answers out of a report."""
    (ranked,) = [row for row in report["tasks"][0]["systems"] if "calibration" in row]
    calibration = ranked.pop("calibration")
    return [calibration["ece"], calibration["brier"]]


@pytest.mark.slow
def test_four_ranks_report_what_one_process_reports(pairs, tokenizer, tmp_path):
    model = tiny_model(num_experts=8, num_heads=4, d_ff=34, eval_capacity_factor=0.5)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    asked = ["run", "--model", tmp_path / "model", "--pairs", pairs, "--capacity-factor", "0.75"]
    mesh = ["--ep", "2", "--tp", "2", "--timeout", "60"]
    one = call(*asked, "--out", tmp_path / "one")
    four = start_torchrun(4, "stmoe", "eval", *asked, *mesh, "--out", tmp_path / "four").finish()
    reports = []
    for done, name in ((one, "one"), (four, "four")):
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("pairs_labels  model") == 2
        reports.append(json.loads((tmp_path / name / "report.json").read_text()))

    # Ranks add in another order, which moves the last digits of probabilities.
    alone, together = map(take_calibration, reports)
    assert together == pytest.approx(alone, rel=1e-4)
    assert reports[1]["tasks"] == reports[0]["tasks"]
    assert reports[1]["command"].startswith("torchrun --nproc-per-node 4 -m stmoe eval run")
    file = "predictions/pairs_labels.model.generate.jsonl"
    assert (tmp_path / "four" / file).read_bytes() == (tmp_path / "one" / file).read_bytes()


@pytest.mark.slow
def test_a_mesh_that_does_not_fit_is_one_message_for_all_ranks(folders, pairs, tmp_path):
    model = ["--model", folders["moe"], "--pairs", pairs, "--out", tmp_path / "out"]
    done = real_torchrun(2, "run", *model, "--ep", "2")
    assert done.returncode != 0
    assert done.stderr.count("7 experts cannot be spread evenly over ep 2") == 1
    codes = re.findall(r"exitcode *: (-?\d+)", done.stderr)
    assert "2" in codes
    assert set(codes) <= {"2", "-15"}  # torchrun ends the others when it sees the first end
    assert "eval/stmoe_eval/" not in done.stderr  # no traceback of ours
