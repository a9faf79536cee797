"""The files of a real evaluation, damaged or edited in one place: the same answer, or one error
that names the file.
"""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe import CheckpointError, ConfigError, DataError
from stmoe_eval.answers.batches import Request
from stmoe_eval.answers.seq2seq import load_seq2seq
from stmoe_eval.commands.compare import compare_runs
from stmoe_eval.run import evaluate
from tests.eval.rows import FIXTURES

TASK = "copa"
FILES = (
    "report.json",
    f"examples/{TASK}.jsonl",
    f"predictions/{TASK}.model.rank.jsonl",
    f"predictions/{TASK}.model.generate.jsonl",
)
JUNK = [b"", b"[]", b"NaN", b"9" * 5_000, b'{"id": "\\ud800"}', b"\xff"]


@pytest.fixture(scope="module")
def runs(folders, tmp_path_factory) -> tuple[Path, Path]:
    """Two whole evaluations."""
    first, second = (tmp_path_factory.mktemp("run") / name for name in ("moe", "t5"))
    for out in (first, second):
        report = evaluate({"model": folders[out.name]}, [TASK], data=FIXTURES, out=out, command="")
        assert report.failed == []
    return first, second


@pytest.fixture
def copied(runs, tmp_path) -> Path:
    """A copy of the first run, which may be damaged."""
    return Path(shutil.copytree(runs[0], tmp_path / "run"))


def a_change(draw, content: bytes) -> bytes:
    """Returns what is left of a file after some bytes or one line were changed."""
    lines = content.split(b"\n")
    line = draw(st.integers(0, len(lines) - 1))
    start = draw(st.integers(0, len(content) - 1))
    kind = draw(st.sampled_from(["bytes", "delete", "double", "junk"]))
    if kind == "bytes":
        stop = draw(st.sampled_from([start + 1, len(content)]))
        return content[:start] + draw(st.binary(max_size=1)) + content[stop:]
    if kind == "delete":
        lines.pop(line)
    elif kind == "double":
        lines.insert(line, lines[line])
    else:
        lines[line] = draw(st.sampled_from(JUNK))
    return b"\n".join(lines)


@settings(max_examples=25)
@given(st.data())
def test_compare_reads_a_damaged_run_or_says_what_is_wrong(runs, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(runs[0], folder)
    name = data.draw(st.sampled_from(FILES))
    (folder / name).write_bytes(a_change(data.draw, (folder / name).read_bytes()))
    try:
        tasks = compare_runs(str(folder), str(runs[1])).tasks
    except (DataError, ConfigError):
        return
    assert {task.task for task in tasks} == {TASK}


@pytest.mark.parametrize(
    ("number", "changes", "message"),
    [
        (1, {"model": "0" * 16}, "line 1: model is '0000000000000000', but the report has"),
        (2, {"output": 7}, "line 2: output is 7: Input should be a valid string"),
    ],
)
def test_an_answer_of_another_model_or_kind_is_refused_by_line(
    runs, copied, number, changes, message
):
    path = copied / FILES[2]
    lines = path.read_text().splitlines()
    lines[number - 1] = json.dumps(json.loads(lines[number - 1]) | changes)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=f"copa.model.rank.jsonl, {message}.*Restore"):
        compare_runs(str(copied), str(runs[1]))


@pytest.mark.parametrize(
    ("field", "value", "noun"), [("models", {}, "lists no model"), ("tasks", [{}], "tasks.0")]
)
def test_a_report_that_lacks_something_is_refused(runs, copied, field, value, noun):
    path = copied / "report.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {field: value}))
    with pytest.raises(DataError, match=rf"report\.json.*{noun}.*Restore it"):
        compare_runs(str(copied), str(runs[1]))


def test_examples_with_other_references_are_refused(runs, copied):
    path = copied / FILES[1]
    path.write_text(path.read_text().replace('"targets": "choice1"', '"targets": "choice2"'))
    with pytest.raises(DataError, match=r"copa\.jsonl does not contain the examples of the rep"):
        compare_runs(str(copied), str(runs[1]))


@pytest.mark.parametrize("content", ["[]", '{"mean": "high"}', '{"step": 1.5}'])
def test_damaged_scores_of_a_best_model_are_one_message(folders, tmp_path, content):
    model = shutil.copytree(folders["t5"], tmp_path / "best/model")
    (tmp_path / "best/scores.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"best/scores\.json.* Restore it, or remove it"):
        evaluate({"m": model}, [TASK], data=FIXTURES, out=tmp_path / "out", command="")


# ---- folders of models ----


@pytest.fixture
def copied_model(folders, tmp_path) -> Path:
    return Path(shutil.copytree(folders["t5"], tmp_path / "model"))


def test_a_tokenizer_whose_pattern_backtracks_without_end_is_one_error(copied_model):
    file = copied_model / "tokenizer.json"
    content = json.loads(file.read_text())
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "invert": False}
    content["normalizer"] = None
    content["pre_tokenizer"] = {**pattern, "behavior": "Isolated"}
    file.write_text(json.dumps(content))

    request = Request("0", "a" * 60 + "!", ())
    with pytest.raises(CheckpointError, match=r"tokenizer of .*failed on a text: .*retry-lim"):
        load_seq2seq(copied_model).tokenize([request], 512)


@pytest.mark.parametrize("part", ["config.json", "tokenizer_config.json"])
def test_code_beside_a_checkpoint_is_never_asked_about_nor_run(part, copied_model, monkeypatch):
    """A tokenizer whose code is not run is read from its files; a model cannot be."""

    def refuse(prompt: str = "") -> str:
        raise AssertionError(f"asked: {prompt}")

    monkeypatch.setattr("builtins.input", refuse)
    (copied_model / "strange.py").write_text("raise AssertionError('was run')")

    content = json.loads((copied_model / part).read_text())
    if part == "config.json":
        content |= {"model_type": "strange", "auto_map": {"AutoConfig": "strange.Config"}}
    else:
        auto_map = {"AutoTokenizer": ["strange.Tokenizer", None]}
        content |= {"tokenizer_class": "StrangeTokenizer", "auto_map": auto_map}
    (copied_model / part).write_text(json.dumps(content))
    if part == "tokenizer_config.json":
        assert load_seq2seq(copied_model).tokenizer("fire")["input_ids"]
        return
    with pytest.raises(CheckpointError, match="needs code that lies beside it, and such code is"):
        load_seq2seq(copied_model)
