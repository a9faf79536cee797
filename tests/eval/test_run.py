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
from eval.baselines.data import BaselineSettings, check_baselines, read_baseline_data
from eval.commands.compare import compare_runs
from eval.dev_scores import read_tasks
from eval.reports import task_summary
from eval.reports.records import FailedTask
from eval.reports.run_folder import (
    SavedReport,
    SavedTask,
    predictions_path,
    read_answers,
    write_examples,
)
from eval.reports.task_summary import score_system
from eval.run import check_tasks, evaluate, read_task
from eval.scores.superglue import SUPERGLUE
from eval.task import TASKS
from moe import ConfigError, DataError
from moe.data.corpus import build_corpus, save_corpus
from moe.data.documents import Document
from moe.data.mixture import choose_examples
from moe.parsing import to_json

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
    modes = {system.mode for system in report.tasks[0].systems}
    assert modes == {"generate", "rank", "baseline"}
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
    write_rows(tmp_path / "data", "validation", 13)
    options = {"modes": ["rank"], "data": tmp_path / "data"}
    report = run(folders, ["boolq"], tmp_path / "a", **options)
    assert baselines_of(report) == {}
    folder = tmp_path / "data/boolq"
    assert f"No baselines: {folder} has no rows of the split 'train'." in report.tasks[0].notes

    write_rows(tmp_path / "data", "train", 20)
    report = run(folders, ["boolq"], tmp_path / "b", **options)
    baselines = baselines_of(report)
    assert list(baselines) == ["majority", "naive Bayes", "logistic regression"]
    assert baselines["logistic regression"].scores[0].value == 100
    for system in baselines.values():
        assert system.fitted_to == "all 20 training examples"
    text = "Fitted to all 20 training examples: majority, naive Bayes, logistic regression."
    assert text in (tmp_path / "b/report.md").read_text()
    assert text in (tmp_path / "b/report.html").read_text()


def test_a_label_budget_is_that_of_fine_tuning_and_is_said(folders, tmp_path):
    write_rows(tmp_path / "data", "validation", 13)
    write_rows(tmp_path / "data", "train", 20)
    asked = read_task(TASKS.get("boolq"), "validation", data=tmp_path / "data")
    for size, seed in ((7, 3), (11, 3), (7, 4)):
        settings = BaselineSettings(train_examples=size, train_seed=seed)
        data = read_baseline_data(asked.task, "validation", settings, tmp_path / "data", None)
        whole = read_tasks(["boolq"], str(tmp_path / "data")).train["boolq"]
        chosen = [(example.inputs, example.targets) for example in data.train]
        assert chosen == choose_examples(whole, size, seed)

    options = {"modes": ["rank"], "data": tmp_path / "data", "limit": 5}
    for size in (7, 11):
        settings = BaselineSettings(train_examples=size, train_seed=3)
        report = run(folders, ["boolq"], tmp_path / "out", baselines=settings, **options)
        fitted_to = f"{size} of 20 training examples (seed 3)"
        assert {system.fitted_to for system in baselines_of(report).values()} == {fitted_to}

    # What fewer labels gave is not overwritten.
    assert report.earlier == "report.1.json"
    assert "7 of 20 training examples" in (tmp_path / "out/report.1.json").read_text()


def test_word_vectors_of_a_corpus_are_one_more_baseline_that_dev_examples_choose(folders, tmp_path):
    documents = []
    for number in range(23):
        text = f"It is true and right. It is false and wrong, number {number}."
        documents.append(Document(text, f"{number}.txt", "own", "none"))
    save_corpus(build_corpus(documents), tmp_path / "corpus")
    for split, number in (("train", 20), ("validation", 13), ("test", 11)):
        write_rows(tmp_path / "data", split, number)

    settings = BaselineSettings(text=str(tmp_path / "corpus"))
    options = {"modes": ["rank"], "data": tmp_path / "data", "baselines": settings}
    for split, chosen_on in (
        ("test", "13 dev examples"),
        ("validation", "4 of the training examples"),
    ):
        report = run(folders, ["boolq"], tmp_path / split, split=split, **options)
        assert report.failed == []
        system = baselines_of(report)["word vectors"]
        assert system.fitted_to.startswith("all 20 training examples and ")
        assert f"{tmp_path / 'corpus'} (0.0 million characters)" in system.fitted_to
        assert system.fitted_to.endswith(f"chosen on {chosen_on}")
        assert system.scores[0].value == 100


@pytest.mark.parametrize(
    ("settings", "tasks", "message"),
    [
        ({"train_examples": 0}, ["boolq"], "--train-examples is 0; expected an integer of at"),
        ({"train_seed": -1}, ["boolq"], "--train-seed is -1; expected an integer from 0"),
        ({"train_seed": 3}, ["boolq"], "--train-seed 3 would change nothing.*Give both"),
        ({"train_examples": 5}, ["squad"], "--train-examples 5 would change nothing: no task has"),
        ({"text": "runs"}, ["xsum"], "--baseline-text runs would change nothing: no task is a"),
    ],
)
def test_settings_of_baselines_that_cannot_be_or_change_nothing_are_refused(
    settings, tasks, message
):
    with pytest.raises(ConfigError, match=message):
        check_baselines(BaselineSettings(**settings), map(TASKS.get, tasks))


def test_damaged_training_rows_fail_the_task_before_a_model_answers(folders, tmp_path):
    write_rows(tmp_path / "data", "validation", 5)
    (tmp_path / "data/boolq/train.jsonl").write_text('{"question": "is it"}\n')
    report = run(folders, ["boolq"], tmp_path / "out", data=tmp_path / "data")
    (failure,) = report.failed
    assert "Line 1 of" in failure.message and "no column 'passage'" in failure.message
    assert not (tmp_path / "out/predictions").exists()


# ---- hidden labels ----


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
