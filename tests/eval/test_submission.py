"""Predictions on splits with hidden labels, and the files that the sites of GLUE and SuperGLUE take.

The expected files are written by hand in the form of the sites.
"""

import json

import pytest

from moe import DataError
from stmoe_eval.commands.compare import compare_runs
from stmoe_eval.commands.run import print_scores
from stmoe_eval.run import evaluate
from stmoe_eval.submission import write_submission
from stmoe_eval.task import TASKS
from tests.eval.rows import FIXTURES, predictions_by_id

pytestmark = pytest.mark.usefixtures("short_answers")

JSON_LINES = {
    "boolq": ("BoolQ", ["True", "maybe"], ["true", "false"]),
    "cb": ("CB", ["neutral", "contradiction"], ["neutral", "contradiction"]),
    "copa": ("COPA", ["choice2", "choice1"], [1, 0]),
    "record": ("ReCoRD", ["Tarn Lake", "Bergdorf"], ["Tarn Lake", "Bergdorf"]),
    "rte": ("RTE", ["not_entailment", "entailment"], ["not_entailment", "entailment"]),
    "wic": ("WiC", ["False", "True"], ["false", "true"]),
    "wsc": ("WSC", ["Ines", ""], ["True", "False"]),
}
TABLES = {
    "cola": ("CoLA", ["acceptable", "unacceptable"], ["1", "0"]),
    "sst2": ("SST-2", ["positive", "so so"], ["1", "0"]),
    "mrpc": ("MRPC", ["equivalent", "not_equivalent"], ["1", "0"]),
    "stsb": ("STS-B", ["7.0", "nan"], ["5.000", "0.000"]),
    "mnli": ("MNLI-m", ["neutral", "contradiction"], ["neutral", "contradiction"]),
    "mnli_mismatched": ("MNLI-mm", ["entailment", "neutral"], ["entailment", "neutral"]),
    "qnli": ("QNLI", ["not_entailment", "entailment"], ["not_entailment", "entailment"]),
    "glue_rte": ("RTE", ["entailment", "not_entailment"], ["entailment", "not_entailment"]),
    "wnli": ("WNLI", ["entailment", "not_entailment"], ["1", "0"]),
    "qqp": ("QQP", ["duplicate", "not_duplicate"], ["1", "0"]),
}


def submit(name, outputs, folder):
    """Returns what was written of answers to the fixtures, in reversed order, and its text."""
    task = TASKS.get(name)
    examples = task.examples("test", FIXTURES)[::-1]
    values = task.values(examples, outputs[::-1]).answers
    values = [value["value"] if isinstance(value, dict) else value for value in values]
    features = [example.fields for example in examples]
    written = write_submission(task.submission, folder, "ours.rank", features, values)
    return written, (folder / written.file).read_text()


@pytest.mark.parametrize("name", [*JSON_LINES, *TABLES])
def test_files_of_the_sites_have_a_label_for_each_example_in_order(name, tmp_path):
    file, outputs, labels = {**JSON_LINES, **TABLES}[name]
    written, text = submit(name, outputs, tmp_path)
    if name in TABLES:
        assert written.file == f"submission/GLUE.ours.rank/{file}.tsv"
        assert text == f"index\tprediction\n0\t{labels[0]}\n1\t{labels[1]}\n"
        return
    assert written.file == f"submission/SuperGLUE.ours.rank/{file}.jsonl"
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines == [{"idx": idx, "label": label} for idx, label in enumerate(labels)]
    assert text.endswith("\n")


def test_multirc_has_a_line_for_each_paragraph_with_its_questions(tmp_path):
    written, text = submit("multirc", ["True", "perhaps"], tmp_path)
    answers = [{"idx": 0, "label": 1}, {"idx": 1, "label": 0}]
    expected = {"idx": 0, "passage": {"questions": [{"idx": 0, "answers": answers}]}}
    assert json.loads(text) == expected
    assert (written.num_replaced, written.fallback) == (1, "0")


def test_every_task_of_both_benchmarks_has_a_file_of_its_own_and_no_other_task_has_one():
    forms = {name: TASKS.get(name).submission for name in TASKS.names()}
    with_file = {name for name, form in forms.items() if form is not None}
    assert with_file == {*JSON_LINES, *TABLES, "multirc", "axb", "axg", "ax"}
    places = {(form.site, form.name) for form in forms.values() if form is not None}
    assert len(places) == len(with_file)


def test_rows_that_share_an_idx_are_not_those_of_the_site(tmp_path):
    form = TASKS.get("boolq").submission
    assert write_submission(form, tmp_path, "ours.rank", [{"idx": 3}, {"idx": 3}], [0, 1]) is None
    assert list(tmp_path.iterdir()) == []


def predict_test(models, tasks, out, modes, **options):
    """Evaluates on test splits, whose labels are hidden but for those of a diagnostic."""
    options = {"data": FIXTURES, "command": "stmoe eval", **options}
    return evaluate(models, tasks, out=out, modes=modes, split="test", **options)


@pytest.fixture(scope="module")
def report(folders, tmp_path_factory):
    """A run on test splits: hidden labels, hidden labels of a group, and known ones."""
    out = tmp_path_factory.mktemp("hidden") / "run"
    models = {"ours": folders["moe"], "other": folders["t5"]}
    return out, predict_test(models, ["boolq", "multirc", "axb"], out, ["rank"])


def test_a_hidden_split_is_predicted_without_scores_and_says_so(report, capsys):
    out, found = report
    assert found.failed == []
    boolq, multirc, axb = found.tasks
    assert (boolq.num_hidden, multirc.num_hidden, axb.num_hidden) == (2, 2, 0)
    assert [system.scores for system in boolq.systems] == [[], []]
    assert axb.systems[0].scores[0].value is not None
    assert boolq.published == []
    assert all(count.total == 0 for count in boolq.by_class)
    assert sum(count.answered for count in boolq.by_class) == 2
    assert "labels of 2 of 2 examples are hidden: answers are predicted" in boolq.notes[0]

    for name in ("report.md", "report.html"):
        text = (out / name).read_text()
        assert "not scored" in text
        assert "submission/SuperGLUE.ours.rank/BoolQ.jsonl" in text
    for system in ("ours", "other"):
        folder = out / f"submission/SuperGLUE.{system}.rank"
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["AX-b.jsonl", "BoolQ.jsonl", "MultiRC.jsonl"]
        predictions = predictions_by_id(out / f"predictions/boolq.{system}.rank.jsonl")
        for line in (folder / "BoolQ.jsonl").read_text().splitlines():
            row = json.loads(line)
            assert row["label"] == predictions[str(row["idx"])].output.lower()
    print_scores(found)
    printed = capsys.readouterr().out
    assert "boolq  ours                 rank      not scored: labels are hidden" in printed
    assert "see submission/SuperGLUE.other.rank/MultiRC.jsonl" in printed


def test_hidden_labels_are_not_compared(report):
    out, _ = report
    result = compare_runs(f"ours={out}", f"other={out}")
    assert [task.task for task in result.tasks] == ["axb"]
    assert "boolq by rank is not scored: its labels are hidden." in result.left_out
    with pytest.raises(DataError, match=r"nothing in common.*boolq by rank is not scored"):
        compare_runs(f"ours={out}", f"other={out}", tasks=["boolq"])


def test_answers_that_are_no_label_are_counted_in_a_note(folders, tmp_path):
    """A random model generates no label at all."""
    models = {"ours": folders["t5"]}
    found = predict_test(models, ["cb", "stsb"], tmp_path / "all", ["generate"])
    for task, label in zip(found.tasks, ("entailment", "0.000"), strict=True):
        note = f"2 answers are not labels; `{label}` replaces them."
        assert any(note in sentence for sentence in task.notes)

    # A part of a split has no file.
    found = predict_test(models, ["boolq"], tmp_path / "part", ["rank"], limit=1)
    assert found.tasks[0].systems[0].submission is None
    note = "There is no `BoolQ.jsonl` for the site of SuperGLUE: --limit left out examples."
    assert note in found.tasks[0].notes
    assert not (tmp_path / "part/submission").exists()
