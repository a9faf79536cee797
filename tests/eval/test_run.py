"""Whole evaluations of a tiny model on rows of the user's own, in one process."""

import fcntl
import json
import math
from pathlib import Path

import pytest

import eval.run
from eval.answers.data_ranks import SINGLE_PROCESS
from eval.answers.likelihood import Scoring
from eval.answers.predictions_file import Batch, Header, Prediction, PredictionsFile, ScoringFields
from eval.answers.seq2seq import load_seq2seq
from eval.commands.compare import compare_runs
from eval.dev_scores import read_tasks
from eval.records import FailedTask, to_json
from eval.reports import task_summary
from eval.reports.task_summary import score_system
from eval.run import check_tasks, evaluate, read_task
from eval.run_folder import (
    SavedReport,
    SavedTask,
    predictions_path,
    read_answers,
    write_examples,
)
from eval.scores.superglue import SUPERGLUE
from eval.task import TASKS
from moe import ConfigError, DataError

FIXTURES = Path(__file__).parent / "fixtures"


def run(folders, tasks, out, **options):
    options = {"data": FIXTURES, "modes": ["generate"], **options}
    return evaluate({"ours": folders["moe"]}, tasks, out=out, command="python -m eval", **options)


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
    assert {system.mode for system in report.tasks[0].systems} == {"generate", "rank"}
    assert "superglue" in (tmp_path / "report.html").read_text()
    scores = read_tasks(SUPERGLUE, str(FIXTURES)).scores(None, SINGLE_PROCESS)
    assert scores is not None
    assert scores(folders["moe"], tmp_path / "dev")["mean"] == pytest.approx(average.value)


def test_a_task_that_fails_leaves_the_others_whole(folders, tmp_path, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("of a bug")

    monkeypatch.setattr(
        task_summary, "class_counts", lambda task, *rest: broken() if task.name == "copa" else []
    )
    written = []
    save = eval.run.save_report
    monkeypatch.setattr(
        eval.run,
        "save_report",
        lambda report, out, **options: (
            written.append(len(report.tasks)) or save(report, out, **options)
        ),
    )
    (tmp_path / "data").mkdir()
    for name in ("boolq", "rte", "copa"):
        (tmp_path / "data" / name).symlink_to(FIXTURES / name)
    report = run(folders, ["cb", "boolq", "copa", "rte"], tmp_path / "out", data=tmp_path / "data")
    assert [task.task for task in report.tasks] == ["boolq", "rte"]
    assert [failure.task for failure in report.failed] == ["cb", "copa"]
    assert "There is no folder" in report.failed[0].message
    assert report.failed[1] == FailedTask("copa", "ZeroDivisionError: of a bug")
    assert written == [0, 1, 1, 2]  # after each task
    written = json.loads((tmp_path / "out/report.json").read_text())
    assert written == {**to_json(report), "sha256": written["sha256"]}


def test_two_evaluations_at_once_do_not_write_to_one_folder(folders, tmp_path):
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            DataError, match=r"Another evaluation writes to .*Wait for it, or give another --out"
        ):
            run(folders, ["boolq"], tmp_path)
    assert run(folders, ["boolq"], tmp_path).failed == []
    assert run(folders, ["boolq"], tmp_path).failed == []


def test_reports_that_cannot_be_written_are_one_message(folders, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        DataError,
        match=r"file is a file and holds something else; expected a folder for an evaluation",
    ):
        run(folders, ["boolq"], tmp_path / "file")


def test_the_report_says_what_was_run_on_what(folders, tmp_path):
    scoring = Scoring(include_eos=False, normalize="tokens")
    report = run(folders, ["boolq", "boolq"], tmp_path, modes=["rank"], limit=3, scoring=scoring)
    (task,) = report.tasks
    assert task.data.folder == str(FIXTURES / "boolq")
    assert (task.data.repository, task.num_expected, task.num_examples) == (
        "aps/super_glue",
        3270,
        3,
    )
    assert (task.limit, task.data.split) == (3, "validation")
    largest = next(one for one in task.published if one.system == "ST-MoE-32B")
    assert (largest.value, largest.split, largest.own_metric) == (92.4, "test", "accuracy")
    assert any("not from the hub" in note for note in task.notes)
    assert to_json(report.settings.scoring) == {"include_eos": False, "normalize": "tokens"}
    assert report.versions["torch"]
    assert report.models["ours"].parameters == load_seq2seq(folders["moe"]).model.num_parameters()
    assert set(task.systems[0].router) == {"encoder", "decoder"}


def test_the_best_checkpoint_of_a_run_is_named_where_it_was_chosen(folders, tmp_path):
    (tmp_path / "best").mkdir()
    (tmp_path / "best/model").symlink_to(folders["moe"])
    (tmp_path / "best/scores.json").write_text(
        json.dumps({"step": 7, "boolq/accuracy": 50.0, "mean": 50.0})
    )
    models = {"ours": tmp_path / "best/model"}
    report = evaluate(
        models, ["boolq", "rte"], modes=["rank"], data=FIXTURES, out=tmp_path / "out", command=""
    )
    assert report.models["ours"].chosen_by.tasks == ["boolq"]
    peaks = [any("on this same split" in note for note in task.notes) for task in report.tasks]
    assert peaks == [True, False]
    assert "step 7" in (tmp_path / "out/report.md").read_text()


def test_the_last_checkpoint_of_a_run_is_said_to_be_that(folders, tmp_path):
    (tmp_path / "model").symlink_to(folders["moe"])
    options = {"modes": ["rank"], "data": FIXTURES, "command": ""}
    evaluate({"ours": tmp_path / "model"}, ["rte"], out=tmp_path / "a", **options)
    assert "checkpoints is not known" in (tmp_path / "a/report.md").read_text()
    (tmp_path / "recipe.yaml").touch()
    evaluate({"ours": tmp_path / "model"}, ["rte"], out=tmp_path / "b", **options)
    assert "the last of its run" in (tmp_path / "b/report.md").read_text()


def test_two_runs_of_the_same_rows_are_compared_and_of_a_part_are_not(folders, tmp_path):
    run(folders, ["multirc", "record"], tmp_path / "a")
    evaluate(
        {"t5": folders["t5"]}, ["multirc", "record"], data=FIXTURES, out=tmp_path / "b", command=""
    )
    result = compare_runs(str(tmp_path / "a"), str(tmp_path / "b"))
    assert [(task.task, task.mode) for task in result.tasks] == [
        ("multirc", "generate"),
        ("record", "generate"),
    ]
    assert result.left_out == ["multirc by rank is in B only.", "record by rank is in B only."]
    run(folders, ["multirc"], tmp_path / "c", limit=3)
    with pytest.raises(
        DataError, match="did not answer the same examples of multirc: limit None in A and 3 in B"
    ):
        compare_runs(str(tmp_path / "a"), str(tmp_path / "c"))


@pytest.mark.parametrize(
    "name", [path.name for path in sorted(FIXTURES.iterdir()) if path.is_dir()]
)
def test_examples_of_every_task_score_the_same_when_they_are_read_back(name, tmp_path):
    task = TASKS.get(name)
    examples = task.examples(task.split, FIXTURES)
    outputs = [example.targets if number % 2 else "no" for number, example in enumerate(examples)]
    written = write_examples(tmp_path, task, examples)
    header = Header(
        "f", name, task.version, "generate", task.decoding, "b", ScoringFields(True, "none")
    )
    predictions = PredictionsFile(predictions_path(tmp_path, name, "model", "generate"), header)
    predictions.resume([], lambda whole: whole)
    predictions.append(
        [Batch([Prediction(e.id, out, None) for e, out in zip(examples, outputs, strict=True)], {})]
    )
    saved = SavedTask(
        task=name,
        version=task.version,
        split=task.split,
        limit=None,
        num_examples=len(examples),
        decoding=task.decoding,
        digest=written.digest,
        examples_sha256=written.examples_sha256,
        systems=[],
    )
    report = SavedReport(tmp_path, {"model": "f"}, header.scoring, {name: saved})
    answers = read_answers(report, name, "model", "generate")
    assert task.scores(answers.examples, answers.outputs) == pytest.approx(
        task.scores(examples, outputs), nan_ok=True
    )
    scored = score_system(task, examples, outputs, "model", "generate")
    values = {
        one.metric: math.nan if one.value is None else one.value for one in scored.result.scores
    }
    assert values == pytest.approx(task.scores(examples, outputs), nan_ok=True)


def test_what_cannot_be_run_is_said_before_anything_is_loaded():
    for options, text in (
        ((["rtee"], None, None), r"no task called 'rtee'. Did you mean 'rte'"),
        ((["rte"], ["guess"], None), r"no mode 'guess'. Choose from generate, rank"),
        ((["rte"], ["generat"], None), r"Did you mean 'generate'"),
        ((["rte"], None, "dev"), r"no split 'dev'. Choose from train, validation, test"),
        ((["xsum"], ["rank"], None), r"xsum cannot be evaluated by rank, only by generate"),
    ):
        with pytest.raises(ConfigError, match=text):
            check_tasks(*options)


def has_hidden_fixtures(name: str) -> bool:
    """Returns whether the fixtures of the test split hide their labels; a diagnostic's have them."""
    task = TASKS.get(name)
    return "test" in task.source.hidden and task.split != "test"


@pytest.mark.parametrize("name", list(filter(has_hidden_fixtures, TASKS.names())))
def test_hidden_labels_of_every_task_are_counted_and_may_be_absent(name, tmp_path):
    task = TASKS.get(name)
    assert read_task(task, "test", data=FIXTURES).num_hidden == 2

    # The sites' own files have no column for what they hide.
    home = task.variant_of or name
    (tmp_path / home).mkdir()
    rows = (FIXTURES / home / "test.jsonl").read_text().splitlines()
    with (tmp_path / home / "test.jsonl").open("w") as file:
        for row in map(json.loads, rows):
            absent = row.keys() & task.source.hidden_values.keys()
            assert absent or name == "trivia_qa"
            print(json.dumps({key: row[key] for key in row.keys() - absent}), file=file)
    bare = read_task(task, "test", data=tmp_path)
    assert bare.num_hidden == 2
    assert bare.examples == read_task(task, "test", data=FIXTURES).examples


def test_missing_labels_of_a_split_that_has_them_are_refused_with_other_splits(tmp_path):
    row = json.loads((FIXTURES / "record/test.jsonl").read_text().splitlines()[0])
    (tmp_path / "record").mkdir()
    (tmp_path / "record/validation.jsonl").write_text(json.dumps(row))
    message = (
        r"1 of 1 examples of record have no label in split 'validation', so their answers cannot "
        r"be scored\. Give rows with labels, or choose another split: train or test\."
    )
    with pytest.raises(DataError, match=message):
        read_task(TASKS.get("record"), "validation", data=tmp_path)
