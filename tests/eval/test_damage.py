"""The files of a real evaluation, damaged or edited in one place: the same answer, or one error
that names the file.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from moe import CheckpointError, ConfigError, DataError
from moe.files import KIND_FILE
from stmoe_eval.answers.batches import Request, requests_of
from stmoe_eval.answers.predict import predict
from stmoe_eval.answers.seq2seq import load_seq2seq
from stmoe_eval.commands.compare import compare_runs
from stmoe_eval.run import evaluate
from stmoe_eval.task import TASKS

FIXTURES = Path(__file__).parent / "fixtures"
TASK = "copa"
FILES = (
    "report.json",
    f"examples/{TASK}.jsonl",
    f"predictions/{TASK}.model.rank.jsonl",
    f"predictions/{TASK}.model.generate.jsonl",
)
JUNK = [b"", b"[]", b"7", b"NaN", b"9" * 5_000, b"[" * 100_000, b'{"id": "\\ud800"}', b"\xff"]


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
    """Returns what is left of a file after one byte, one line or its end was changed."""
    lines = content.split(b"\n")
    line = draw(st.integers(0, len(lines) - 1))
    place = draw(st.integers(0, len(content) - 1))
    kind = draw(st.sampled_from(["flip", "drop", "cut", "delete", "double", "junk", "swap"]))
    if kind == "flip":
        flipped = bytes([content[place] ^ draw(st.integers(1, 255))])
        return content[:place] + flipped + content[place + 1 :]
    if kind == "drop":
        return content[:place] + content[place + 1 :]
    if kind == "cut":
        return content[:place]
    if kind == "delete":
        lines.pop(line)
    elif kind == "double":
        lines.insert(line, lines[line])
    elif kind == "junk":
        lines[line] = draw(st.sampled_from(JUNK))
    else:
        lines[line], lines[0] = lines[0], lines[line]
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
        (1, {"mode": "generate"}, "line 1: mode is 'generate', but the report has 'rank'"),
        (2, {"output": 7}, "line 2: output is 7: Input should be a valid string"),
        (3, {"scores": {"choice1": None}}, "line 3: scores.choice1 is None"),
        (2, {"truncated": 1}, "line 2: truncated is 1"),
    ],
)
def test_an_edited_answer_is_refused_by_line(runs, copied, number, changes, message):
    path = copied / FILES[2]
    lines = path.read_text().splitlines()
    lines[number - 1] = json.dumps(json.loads(lines[number - 1]) | changes)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=f"copa.model.rank.jsonl, {message}.*Restore"):
        compare_runs(str(copied), str(runs[1]))


@pytest.mark.parametrize(
    ("field", "value", "noun"),
    [
        ("models", {}, "lists no model"),
        ("models", {"model": {}}, "models.model"),
        ("tasks", [{}], "tasks.0"),
        ("settings", {}, "settings"),
    ],
)
def test_a_report_that_lacks_something_is_refused(runs, copied, field, value, noun):
    path = copied / "report.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {field: value}))
    with pytest.raises(DataError, match=rf"report\.json.*{noun}.*Restore it"):
        compare_runs(str(copied), str(runs[1]))


def test_examples_with_other_references_are_refused(runs, copied):
    path = copied / FILES[1]
    first, *others = path.read_text().splitlines()
    for changes in ({"targets": "choice2"}, {"inputs": ""}, {"id": "99"}):
        changed = json.dumps(json.loads(first) | changes)
        path.write_text("\n".join([changed, *others]) + "\n")
        with pytest.raises(
            DataError, match=r"copa\.jsonl does not contain the examples of the rep"
        ):
            compare_runs(str(copied), str(runs[1]))


@pytest.fixture(scope="module")
def system(folders):
    return load_seq2seq(folders["moe"])


@settings(max_examples=25)
@given(st.data())
def test_a_run_that_goes_on_answers_every_request_or_leaves_the_file_as_it_is(
    runs, system, tmp_path_factory, data
):
    path = tmp_path_factory.mktemp("damaged") / "p.jsonl"
    changed = a_change(data.draw, (runs[0] / FILES[2]).read_bytes())
    path.write_bytes(changed)
    task = TASKS.get(TASK)
    requests = requests_of(task.examples(task.split, FIXTURES))
    try:
        predicted = predict(system, task, requests, "rank", path)
        assert [answer.id for answer in predicted.predictions] == [each.id for each in requests]
        assert predict(system, task, requests, "rank", path) == predicted
    except DataError as error:
        assert str(path) in str(error)
        assert path.read_bytes() == changed


@pytest.mark.parametrize("name", [KIND_FILE, "corpus.json", "config.json"])
def test_an_evaluation_is_not_mixed_with_something_else(folders, tmp_path, name):
    (tmp_path / name).write_text("training run", encoding="utf-8")
    with pytest.raises(DataError, match="and an evaluation would be mixed with it"):
        evaluate({"model": folders["t5"]}, [TASK], data=FIXTURES, out=tmp_path, command="")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_damaged_scores_of_a_best_model_are_one_message(folders, tmp_path):
    model = shutil.copytree(folders["t5"], tmp_path / "best/model")
    for content in ("[]", '{"mean": "high"}', '{"step": 1e400}', '{"step": 1.5}', "{"):
        (tmp_path / "best/scores.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"best/scores\.json.* Restore it, or remove it"):
            evaluate({"m": model}, [TASK], data=FIXTURES, out=tmp_path / "out", command="")


# ---- folders of models ----


@pytest.fixture
def copied_model(folders, tmp_path) -> Path:
    return Path(shutil.copytree(folders["t5"], tmp_path / "model"))


class Code:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_weights_that_pickle_code_are_refused_and_the_code_never_runs(copied_model, tmp_path):
    weights = load_file(copied_model / "model.safetensors")
    torch.save({**weights, "code": Code(tmp_path / "ran")}, copied_model / "pytorch_model.bin")
    (copied_model / "model.safetensors").unlink()

    with pytest.raises(CheckpointError, match=r"model\.bin cannot be read: .* run code"):
        load_seq2seq(copied_model)
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_whose_pattern_backtracks_without_end_is_one_error(copied_model):
    file = copied_model / "tokenizer.json"
    content = json.loads(file.read_text())
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "invert": False}
    content["normalizer"] = None
    content["pre_tokenizer"] = {**pattern, "behavior": "Isolated"}
    file.write_text(json.dumps(content))

    request = Request("0", "a" * 60 + "!", ())
    with pytest.raises(
        CheckpointError, match=r"tokenizer of .*model failed on a text: .*retry-lim"
    ):
        load_seq2seq(copied_model).tokenize([request], 512)
