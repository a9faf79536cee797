"""Whole evaluations of a tiny model on rows of the user's own, in one process."""

import fcntl
import json
import re

import pytest

import stmoe_eval.run
from moe import DataError
from moe.data.mixture import choose_examples
from moe.parsing import to_json
from stmoe_eval.answers.data_ranks import SINGLE_PROCESS
from stmoe_eval.answers.likelihood import Scoring
from stmoe_eval.answers.seq2seq import load_seq2seq
from stmoe_eval.baselines.data import BaselineSettings, read_baseline_data
from stmoe_eval.dev_scores import read_tasks
from stmoe_eval.reports import task_summary
from stmoe_eval.reports.records import FailedTask
from stmoe_eval.reports.run_folder import read_report
from stmoe_eval.run import evaluate, read_task
from stmoe_eval.scores.superglue import SUPERGLUE
from stmoe_eval.task import TASKS
from tests.eval.rows import FIXTURES

pytestmark = pytest.mark.usefixtures("short_answers")


def run(folders, tasks, out, **options):
    options = {"data": FIXTURES, "modes": ["generate"], **options}
    return evaluate({"ours": folders["moe"]}, tasks, out=out, command="stmoe eval", **options)


@pytest.mark.slow
def test_the_superglue_average_is_that_of_its_eight_tasks(folders, tmp_path):
    report = run(folders, [*SUPERGLUE, "axb"], tmp_path, modes=None)
    assert report.failed == []
    (average,) = report.averages  # wsc has no choices to rank
    assert (average.name, average.mode) == ("ours", "generate")
    parts = []
    for task in report.tasks[:8]:
        system = next(system for system in task.systems if system.mode == "generate")
        values = [score.value for score in system.scores]
        parts.append(sum(values) / len(values))
    assert average.value == pytest.approx(sum(parts) / 8)
    assert average.low <= average.value <= average.high
    assert "superglue" in (tmp_path / "report.html").read_text()
    scores = read_tasks(SUPERGLUE, str(FIXTURES)).scores(None, SINGLE_PROCESS)
    assert scores is not None
    assert scores(folders["moe"], tmp_path / "dev")["mean"] == pytest.approx(average.value)


def test_a_task_that_fails_leaves_the_others_whole(folders, tmp_path, monkeypatch):
    def count_classes(task, *_):
        if task.name == "copa":
            raise ZeroDivisionError("of a bug")
        return []

    written = []
    write = stmoe_eval.run.write_reports

    def count_and_write(report, out):
        written.append(len(report.tasks))
        write(report, out)

    monkeypatch.setattr(task_summary, "class_counts", count_classes)
    monkeypatch.setattr(stmoe_eval.run, "write_reports", count_and_write)
    (tmp_path / "data").mkdir()
    for name in ("boolq", "rte", "copa"):
        (tmp_path / "data" / name).symlink_to(FIXTURES / name)
    report = run(folders, ["cb", "boolq", "copa", "rte"], tmp_path / "out", data=tmp_path / "data")
    assert [task.task for task in report.tasks] == ["boolq", "rte"]
    assert [failure.task for failure in report.failed] == ["cb", "copa"]
    assert "There is no folder" in report.failed[0].message
    assert report.failed[1] == FailedTask("copa", "ZeroDivisionError: of a bug")
    assert written == [0, 1, 1, 2]  # after each task
    assert read_report(tmp_path / "out").failed == report.failed


def test_two_evaluations_at_once_do_not_write_to_one_folder(folders, tmp_path):
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"Another evaluation writes to .*another --out"):
            run(folders, ["rte"], tmp_path)
    assert run(folders, ["rte"], tmp_path).failed == []


def test_the_report_says_what_was_run_on_what(folders, tmp_path):
    scoring = Scoring(include_eos=False, normalize="tokens")
    report = run(folders, ["boolq", "boolq"], tmp_path, modes=["rank"], limit=3, scoring=scoring)
    (task,) = report.tasks
    assert task.data.folder == str(FIXTURES / "boolq")
    assert task.data.repository == "aps/super_glue"
    assert (task.num_expected, task.num_examples, task.limit) == (3270, 3, 3)
    largest = next(one for one in task.published if one.system == "ST-MoE-32B")
    assert (largest.value, largest.split, largest.own_metric) == (92.4, "test", "accuracy")
    assert any("not from the hub" in note for note in task.notes)
    assert to_json(report.settings.scoring) == {"include_eos": False, "normalize": "tokens"}
    assert report.models["ours"].parameters == load_seq2seq(folders["moe"]).model.num_parameters()


def test_the_report_says_which_checkpoint_of_its_run_a_model_is(folders, tmp_path):
    (tmp_path / "best").mkdir()
    scores = {"step": 7, "boolq/accuracy": 50.0, "mean": 50.0}
    (tmp_path / "best/scores.json").write_text(json.dumps(scores))
    for name in ("best/model", "model"):
        (tmp_path / name).symlink_to(folders["moe"])
    options = {"modes": ["rank"], "data": FIXTURES, "command": ""}

    # The best model was chosen by dev scores on the evaluated split; the recipe beside the last names its run.
    (tmp_path / "recipe.yaml").touch()
    models = {"best": tmp_path / "best/model", "last": tmp_path / "model", "t5": folders["t5"]}
    report = evaluate(models, ["boolq", "rte"], out=tmp_path / "out", **options)
    assert report.models["best"].chosen_by.tasks == ["boolq"]
    peaks = [any("on this same split" in note for note in task.notes) for task in report.tasks]
    assert peaks == [True, False]
    text = (tmp_path / "out/report.md").read_text()
    assert "step 7" in text
    assert text.count("last checkpoint of its run") == 1


# ---- baselines ----


def baselines_of(report):
    (task,) = report.tasks
    return {system.name: system for system in task.systems if system.mode == "baseline"}


def write_rows(folder, split, number):
    """Rows of BoolQ whose question tells the label."""
    rows = []
    for index in range(number):
        question = ("is it true", "is it false")[index % 2]
        rows.append({"question": question, "passage": "a", "idx": index, "label": 1 - index % 2})
    (folder / "boolq").mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"boolq/{split}.jsonl").write_text(lines)


def test_rows_of_the_user_have_baselines_where_training_rows_are_among_them(folders, tmp_path):
    data = tmp_path / "data"
    write_rows(data, "validation", 13)
    report = run(folders, ["boolq"], tmp_path / "a", modes=["rank"], data=data)
    assert baselines_of(report) == {}
    assert f"No baselines: {data}/boolq has no rows of the split 'train'." in report.tasks[0].notes

    write_rows(data, "train", 20)
    report = run(folders, ["boolq"], tmp_path / "b", modes=["rank"], data=data)
    baselines = baselines_of(report)
    assert list(baselines) == ["majority", "naive Bayes", "logistic regression"]
    assert baselines["logistic regression"].scores[0].value == 100
    assert {system.fitted_to for system in baselines.values()} == {"all 20 training examples"}
    text = "majority, naive Bayes, logistic regression: fitted to all 20 training examples."
    for name in ("report.md", "report.html"):
        assert text in (tmp_path / "b" / name).read_text()


def test_a_label_budget_is_that_of_fine_tuning_and_is_said(folders, tmp_path):
    data = tmp_path / "data"
    write_rows(data, "validation", 13)
    write_rows(data, "train", 20)
    asked = read_task(TASKS.get("boolq"), "validation", data=data)
    whole = read_tasks(["boolq"], str(data)).train["boolq"]
    for size, seed in ((7, 3), (11, 3), (7, 4)):
        settings = BaselineSettings(train_examples=size, train_seed=seed)
        read = read_baseline_data(asked.task, settings, data)
        chosen = [(example.inputs, example.targets) for example in read.train]
        assert chosen == choose_examples(whole, size, seed)

    options = {"modes": ["rank"], "data": data, "limit": 5}
    for size in (7, 11):
        settings = BaselineSettings(train_examples=size, train_seed=3)
        report = run(folders, ["boolq"], tmp_path / "out", baselines=settings, **options)
        fitted_to = f"{size} of 20 training examples (seed 3)"
        assert {system.fitted_to for system in baselines_of(report).values()} == {fitted_to}


def test_rows_that_cannot_be_used_fail_the_task_before_a_model_answers(folders, tmp_path):
    data = tmp_path / "data"
    write_rows(data, "validation", 5)
    (data / "boolq/train.jsonl").write_text('{"question": "is it"}\n')
    (data / "record").mkdir()
    row = (FIXTURES / "record/test.jsonl").read_text().splitlines()[0]
    (data / "record/validation.jsonl").write_text(row)
    report = run(folders, ["boolq", "record"], tmp_path / "out", data=data)
    damaged, unlabelled = report.failed
    assert "train.jsonl, line 1: passage is missing" in damaged.message
    message = r"1 of 1 examples of record have no label in split 'validation'.* train or test\."
    assert re.match(message, unlabelled.message)
    assert not (tmp_path / "out/predictions").exists()
