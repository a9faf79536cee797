"""stmoe eval as a user calls it."""

import hashlib
import json
import sys

import pytest

import stmoe
from moe.cli import run_main
from moe.errors import DataError
from moe.files import KIND_FILE
from stmoe_eval.task import TASKS
from tests.eval.test_pairs import PAIRS, write
from tests.models.tiny import tiny_model
from tests.processes import start_torchrun


@pytest.fixture
def pairs(tmp_path):
    return write(tmp_path / "pairs.jsonl", PAIRS)


def test_run_evaluates_two_models_beside_the_baselines_and_compare_reads_them(
    folders, pairs, tmp_path, capsys, short_answers
):
    run = tmp_path / "run"
    models = ["--model", f"ours={folders['moe']}", "--also", f"t5={folders['t5']}"]
    train = [{**pair, "inputs": f"{pair['inputs']} the"} for pair in PAIRS]
    data = ["--pairs", pairs, "--train-pairs", write(tmp_path / "train.jsonl", train)]
    stmoe.main(["eval", "run", *models, *map(str, data), "--limit", "19", "--out", str(run)])
    printed = capsys.readouterr().out
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
        assert str(run / f"report.{kind}") in printed
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


RUN = ["run", "--model", "no", "--tasks", "boolq"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*RUN[:-1], "bolq"], "Did you mean 'boolq'"),
        ([*RUN, "--modes", "guess"], "no mode 'guess'"),
        ([*RUN, "--modes", "rank,"], "--modes is 'rank,'"),
        ([*RUN, "--limit", "0"], "--limit is 0; expected an integer of at least 1"),
        ([*RUN, "--dropless", "--capacity-factor", "2"], "not allowed with"),
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


@pytest.mark.parametrize("verb", ["run", "compare"])
@pytest.mark.parametrize("name", [KIND_FILE, "config.json"])
def test_results_are_not_mixed_with_something_else(verb, name, folders, tmp_path):
    (tmp_path / name).write_text("training run", encoding="utf-8")
    run = ["--model", str(folders["t5"]), "--tasks", "boolq"]
    words = {"run": run, "compare": ["a", "b"]}[verb]
    with pytest.raises(DataError, match="would be mixed with it"):
        stmoe.main(["eval", verb, *words, "--out", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == [name]


def take_calibration(report):
    """Takes the calibration of ranked answers out of a report."""
    (ranked,) = [row for row in report["tasks"][0]["systems"] if "calibration" in row]
    calibration = ranked.pop("calibration")
    return [calibration["ece"], calibration["brier"]]


@pytest.mark.slow
def test_two_ranks_report_what_one_process_reports(pairs, tokenizer, tmp_path):
    model = tiny_model(num_experts=8, num_heads=4, d_ff=34, eval_capacity_factor=0.5)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    asked = ["run", "--model", tmp_path / "model", "--pairs", pairs, "--capacity-factor", "0.75"]
    asked = list(map(str, asked))
    stmoe.main(["eval", *asked, "--out", str(tmp_path / "one")])
    mesh = ["--ep", "2", "--timeout", "60", "--out", tmp_path / "two"]
    two = start_torchrun(2, "stmoe", "eval", *asked, *mesh).finish()
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("pairs_labels  model") == 2
    reports = []
    for name in ("one", "two"):
        reports.append(json.loads((tmp_path / name / "report.json").read_text()))

    # Ranks add in another order, which moves the last digits of probabilities.
    alone, together = map(take_calibration, reports)
    assert together == pytest.approx(alone, rel=1e-4)
    assert reports[1]["tasks"] == reports[0]["tasks"]
    assert reports[1]["command"].startswith("torchrun --nproc-per-node 2 -m stmoe eval run")
    file = "predictions/pairs_labels.model.generate.jsonl"
    assert (tmp_path / "two" / file).read_bytes() == (tmp_path / "one" / file).read_bytes()


def test_every_task_has_one_line_in_the_list_below_its_family(capsys):
    stmoe.main(["eval", "list"])
    lines = capsys.readouterr().out.splitlines()
    families, cells, family = {}, {}, ""
    for line in lines[1 : lines.index("")]:
        if line.startswith("  "):
            name, content = line.split(maxsplit=1)
            families[name], cells[name] = family, " ".join(content.split())
        else:
            family = line
    assert families == {name: TASKS.get(name).family for name in TASKS.names()}
    record = "1 em, f1 100,730/*10,000/(10,000) T5 aps/super_glue record Apache-2.0"
    assert cells["record"].startswith(record)
    assert "16,946/1,000/*1,000 FLAN" in cells["anli_r1.flan"]
