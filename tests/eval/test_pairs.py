"""stmoe eval run --pairs: any model on a file of pairs, with intervals, baselines and comparison.

Oracles: answers of the model by hand, hashes of the file, and runs on another file.
"""

import hashlib
import json

import pytest

import stmoe
from moe import ConfigError, DataError
from stmoe_eval.pairs import read_pairs_task
from tests.eval.conftest import THINGS

pytestmark = pytest.mark.usefixtures("short_answers")
PAIRS = []
for _number in range(4):
    for _thing, _colour in THINGS.items():
        PAIRS.append({"inputs": f"name {'the ' * _number}{_thing}", "targets": _colour})


def write(path, pairs):
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


@pytest.fixture
def pairs(tmp_path):
    return write(tmp_path / "pairs.jsonl", PAIRS)


def run(*argv):
    stmoe.main(["eval", "run", *map(str, argv)])


def report_of(out):
    return json.loads((out / "report.json").read_text())


def test_labels_in_wide_letters_are_answered_like_narrow_ones(folders, pairs, tmp_path):
    # The labels are the model's own answers, so that it is right; its vocabulary writes narrow letters.
    run("--model", folders["moe"], "--pairs", pairs, "--modes", "generate", "--out", tmp_path / "a")
    (task,) = report_of(tmp_path / "a")["tasks"]
    wide = {number: number + 0xFEE0 for number in range(33, 127)}
    systems, right = [], []
    for name, table in (("narrow", {}), ("wide", wide)):
        answered = []
        for answer in task["worst"]:
            label = answer["output"].translate(table)
            answered += [{"inputs": answer["inputs"], "targets": label}] * 2
        path = write(tmp_path / f"{name}.jsonl", answered)
        run("--model", folders["moe"], "--pairs", path, "--out", tmp_path / name)
        (labels,) = report_of(tmp_path / name)["tasks"]
        systems.append({row["mode"]: row["scores"][0]["value"] for row in labels["systems"]})
        right.append(sum(row["right"] for row in labels["by_class"]))
    assert systems[0] == systems[1] and systems[1]["generate"] == 100
    assert right == [2 * len(task["worst"])] * 2


def test_targets_with_unknown_characters_are_counted_and_groups_kept(folders, tmp_path):
    signs = [{"inputs": f"price {n}", "targets": sign} for n, sign in enumerate("€£€")]
    signs[1]["group"] = signs[2]["group"] = "7"
    path = write(tmp_path / "signs.jsonl", signs)
    run("--model", folders["t5"], "--pairs", path, "--modes", "generate", "--out", tmp_path / "out")
    (task,) = report_of(tmp_path / "out")["tasks"]
    (note,) = task["notes"]
    assert note.startswith("3 targets have characters that the vocabulary lacks")
    assert (task["num_examples"], task["num_groups"]) == (3, 2)


def test_a_split_of_a_downloaded_dataset_is_evaluated(tmp_path):
    for split, rows in (("train", PAIRS), ("test", PAIRS[:2])):
        write(tmp_path / f"{split}.jsonl", rows)
    task = read_pairs_task(tmp_path.with_name(f"{tmp_path.name}:test"), tmp_path)
    inputs = [example.inputs for example in task.examples("validation")]
    assert inputs == [pair["inputs"] for pair in PAIRS[:2]]
    assert len(task.examples("train")) == len(PAIRS) - 2
    digest = hashlib.sha256((tmp_path / "test.jsonl").read_bytes()).hexdigest()
    assert digest[:16] in task.source.origin


def test_baselines_see_no_pair_that_is_evaluated(folders, pairs, tmp_path):
    more = [{"inputs": f"colour of {thing}", "targets": colour} for thing, colour in THINGS.items()]
    train = write(tmp_path / "train.jsonl", [*PAIRS, *more])
    task = read_pairs_task(pairs, train)
    inputs = [example.inputs for example in task.examples("train")]
    assert inputs == [pair["inputs"] for pair in more]
    out = tmp_path / "out"
    model = ["--model", folders["t5"], "--modes", "generate", "--out", out]
    run(*model, "--pairs", pairs, "--train-pairs", train)
    (task,) = report_of(out)["tasks"]
    fitted = {system["name"]: system["fitted_to"] for system in task["systems"][1:]}
    assert fitted.keys() == {"majority", "naive Bayes", "logistic regression"}
    assert set(fitted.values()) == {"all 5 training examples"}
    majority = next(system for system in task["systems"] if system["name"] == "majority")
    share = sum(pair["targets"] in ("red", "green") for pair in PAIRS) / 2 / len(PAIRS)
    assert majority["scores"][0]["value"] == pytest.approx(100 * share)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--pairs", "{pairs}", "--tasks", "copa"], "not allowed with"),
        ([], "--tasks --pairs"),
        (["--pairs", "{folder}"], "is not a file"),
        (["--pairs", "{pairs}", "--train-pairs", "{pairs}x"], "is not a file"),
        (["--pairs", "{empty}"], "holds no pairs"),
        (["--pairs", "{texts}", "--modes", "rank"], "cannot be evaluated by rank"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(folders, pairs, tmp_path, more, message):
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    write(tmp_path / "texts", [{"inputs": "name", "targets": "the " * 11}])
    names = ("folder", "empty", "texts")
    places = {"pairs": pairs, **{name: tmp_path / name for name in names}}
    words = [word.format_map(places) for word in more]
    with pytest.raises((ConfigError, DataError), match=message):
        run("--model", folders["t5"], *words, "--out", tmp_path / "out")
