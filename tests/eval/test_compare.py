"""Two folders of runs, made without a model, and what comparing them says."""

import json
from dataclasses import replace

import pytest

from moe import ConfigError, DataError
from moe.files import write_text
from moe.parsing import to_json
from stmoe_eval.answers.likelihood import ChoiceLikelihood, Scoring
from stmoe_eval.answers.predictions_file import Batch, Header, Prediction, PredictionsFile
from stmoe_eval.commands.compare import compare_runs, comparison_markdown
from stmoe_eval.reports.run_folder import examples_path, predictions_path, write_examples
from stmoe_eval.reports.task_summary import score_system
from stmoe_eval.task import TASKS
from tests.eval.conftest import colour_task
from tests.eval.results import a_model, a_report, a_task


@pytest.fixture(autouse=True)
def colour(monkeypatch):
    """The task of these tests, known by its name."""
    TASKS.names()
    monkeypatch.setitem(TASKS._entries, "colour", colour_task())
    return colour_task()


def write_run(folder, outputs, *, modes=("generate",), name="model", limit=None, **changes):
    """Writes what a run leaves; `outputs` are answers to the first examples, the others are right."""
    task = colour_task()
    examples = task.examples("validation")[:limit]
    answers = [*outputs, *(example.targets for example in examples[len(outputs) :])]
    scoring = Scoring()
    rows = []
    for mode in modes:
        decoding = task.decoding if mode == "generate" else None
        header = Header("f" * 16, task.name, task.version, mode, decoding, "b" * 16, scoring)
        predictions = PredictionsFile(predictions_path(folder, task.name, name, mode), header)
        predictions.resume(lambda num_answered: num_answered)
        made = made_by(mode, examples, answers)
        predictions.append([Batch([prediction], {}) for prediction in reversed(made)])
        rows.append(score_system(task, examples, answers, name, mode).result)
    fields = {"version": task.version, "num_examples": len(examples), "limit": limit}
    fields |= {"decoding": task.decoding, "digest": write_examples(folder, task, examples)}
    result = replace(a_task(task.name), systems=rows, **{**fields, **changes})
    report = a_report(result, models={name: a_model(fingerprint="f" * 16)})
    write_text(folder / "report.json", json.dumps(to_json(report)))
    return str(folder)


def made_by(mode, examples, answers):
    """Returns a prediction for each example; a ranked one chooses between its answer and another."""
    made = []
    for example, answer in zip(examples, answers, strict=True):
        if mode == "generate":
            made.append(Prediction(example.id, answer, None))
            continue
        choices = {answer: ChoiceLikelihood(-1.0, -0.5, 1)}
        choices["another"] = ChoiceLikelihood(-2.0, -0.5, 1)
        made.append(Prediction(example.id, "", {}, choices).scored(Scoring()))
    return made


def test_the_difference_the_test_and_the_examples(tmp_path):
    a = write_run(tmp_path / "a", ["red"] * 3)  # the first example is right
    b = write_run(tmp_path / "b", ["pink"] * 4)
    result = compare_runs(a, b)
    (task,) = result.tasks
    (metric,) = task.metrics
    assert (metric.a, metric.b) == (92, 84)
    assert metric.difference == pytest.approx(8)
    assert (metric.wins, metric.losses, metric.ties) == (2, 0, 23)
    assert metric.p_value == 0.5  # two groups differ, both in favour of A: two of four tosses
    assert metric.low <= 8 <= metric.high
    assert (task.num_outputs_differ, task.num_scores_differ) == (4, 2)
    assert [example.id for example in task.examples] == ["fire-0", "blood-0"]
    assert (task.examples[0].a, task.examples[0].b) == ("red", "pink")
    text = comparison_markdown(result)
    assert "| accuracy | 92.0 | 84.0 | +8.0 |" in text
    assert "| fire-0 | name the colour of fire | red | red | pink | 100.0 | 0.0 |" in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": 2}, r"of colour: version 1 in A and 2 in B"),
        ({"split": "test"}, "split validation in A and test in B"),
        ({"limit": 7}, "limit None in A and 7 in B; num_examples 25 in A and 7 in B"),
        ({"digest": "other"}, "other data, of the same number"),
    ],
)
def test_runs_of_other_examples_are_refused(tmp_path, changes, text):
    a, b = write_run(tmp_path / "a", []), write_run(tmp_path / "b", [], **changes)
    with pytest.raises(DataError, match=text):
        compare_runs(a, b)


def test_sides_tasks_and_modes_are_named_and_what_one_run_lacks_is_said(tmp_path):
    a = write_run(tmp_path / "a", [], modes=("generate", "rank"), name="first")
    b = write_run(tmp_path / "b", [], name="second")
    result = compare_runs(a, f"second={b}")
    assert result.b.name == "second"
    assert [task.mode for task in result.tasks] == ["generate"]
    assert result.left_out == ["colour by rank is in A only."]
    text = comparison_markdown(result)
    assert "- Left out: colour by rank is in A only." in text

    # Systems that score alike have a marked interval.
    (metric,) = result.tasks[0].metrics
    assert metric.difference == 0
    assert metric.low < 0 < metric.high
    assert f"{metric.low:+.1f} to {metric.high:+.1f} *" in text
    assert f"- accuracy: {metric.note}." in text
    assert "no spread was seen" in metric.note

    old = [write_run(tmp_path / name, [], version=0) for name in ("c", "d")]
    for sides, options, message in (
        ((a, f"secnd={b}"), {}, r"no model 'secnd' in .*b. Did you mean 'second'\?"),
        ((a, a), {}, r"both model 'first' of .*a. Name another: NAME=FOLDER"),
        ((a, b), {"mode": "rank"}, r"nothing of --mode rank in common: `first` of .*a has col"),
        ((a, b), {"tasks": ["color"]}, r"task 'color'. Did you mean 'colour'\? They have col"),
        (old, {}, r"version 0 of colour; the library now has version 1"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            compare_runs(*sides, **options)


def test_answers_or_examples_that_are_not_whole_are_said(tmp_path):
    a, b = write_run(tmp_path / "a", []), write_run(tmp_path / "b", ["pink"])
    path = predictions_path(tmp_path / "b", "colour", "model", "generate")
    lines = path.read_text().splitlines(keepends=True)
    # The header, and two lines for each batch of one.
    path.write_text("".join(lines[:15]) + lines[15][:5])
    with pytest.raises(DataError, match=r"7 of 25 examples; .* 'fire-0'.* where it stopped"):
        compare_runs(a, b)
    path.unlink()
    with pytest.raises(DataError, match=r"There is no .*colour.model.generate.jsonl"):
        compare_runs(a, b)

    file = examples_path(tmp_path / "b", "colour")
    file.write_text(file.read_text()[:-7])
    with pytest.raises(DataError, match=r"colour\.jsonl, line 25"):
        compare_runs(a, b)
