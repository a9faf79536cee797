"""stmoe eval run --pairs: any model on a file of pairs, with intervals, baselines and comparison.

Oracles: answers of the model by hand, hashes of the file, and runs on another file.
"""

import hashlib
import json

import pytest

import stmoe
from moe import ConfigError, DataError
from stmoe_eval.pairs import PAIR_TASKS, read_pairs_task
from stmoe_eval.task import TASKS
from tests.eval.conftest import THINGS

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


def test_any_model_is_scored_with_intervals_and_the_report_names_the_file(
    folders, pairs, tmp_path, capsys
):
    out = tmp_path / "out"
    run(
        "--model",
        f"t5={folders['t5']}",
        "--also",
        f"ours={folders['moe']}",
        "--pairs",
        pairs,
        "--out",
        out,
    )
    report = report_of(out)
    (task,) = report["tasks"]
    digest = hashlib.sha256(pairs.read_bytes()).hexdigest()[:16]
    assert task["data"]["origin"] == f"{pairs} (SHA-256 {digest})"
    assert (task["task"], task["num_examples"], task["num_groups"]) == ("pairs_labels", 20, 20)
    modes = {(system["name"], system["mode"]) for system in task["systems"]}
    assert modes == {(name, mode) for name in ("t5", "ours") for mode in ("generate", "rank")}
    for system in task["systems"]:
        (score,) = system["scores"]
        assert score["metric"] == "accuracy" and score["low"] <= score["value"] <= score["high"]
    for text in ((out / "report.md").read_text(), (out / "report.html").read_text()):
        assert digest in text and "truncated at 512 tokens" in text
    assert "pairs_labels" in capsys.readouterr().out


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


def test_targets_with_unknown_characters_are_counted(folders, tmp_path):
    signs = [{"inputs": f"price {number}", "targets": sign} for number, sign in enumerate("€£€")]
    path = write(tmp_path / "signs.jsonl", signs)
    run("--model", folders["t5"], "--pairs", path, "--modes", "generate", "--out", tmp_path / "out")
    (task,) = report_of(tmp_path / "out")["tasks"]
    (note,) = task["notes"]
    assert note.startswith("3 targets have characters that the vocabulary lacks")


def test_groups_are_those_of_the_file(pairs, tmp_path):
    grouped = [{**pair, "group": number // 2} for number, pair in enumerate(PAIRS)]
    task = read_pairs_task(write(tmp_path / "grouped.jsonl", grouped))
    assert len({example.group for example in task.examples("validation")}) == 10
    task = read_pairs_task(pairs)
    assert len({example.group for example in task.examples("validation")}) == 20
    assert task.choices == ("dark blue", "green", "red")


def test_two_runs_are_compared_and_runs_on_other_files_are_refused(
    folders, pairs, tmp_path, capsys
):
    other = [*PAIRS[:-1], {"inputs": "name grass", "targets": "green"}]
    more = ("--modes", "generate")
    run("--model", folders["t5"], "--pairs", pairs, "--out", tmp_path / "a", *more)
    run("--model", folders["moe"], "--pairs", pairs, "--out", tmp_path / "b", *more)
    run(
        "--model",
        folders["moe"],
        "--pairs",
        write(tmp_path / "other", other),
        "--out",
        tmp_path / "c",
        *more,
    )
    run("--model", folders["moe"], "--pairs", pairs, "--limit", 7, "--out", tmp_path / "d", *more)
    sides = {name: str(tmp_path / name) for name in "abcd"}
    stmoe.main(["eval", "compare", sides["a"], sides["b"], "--out", str(tmp_path / "compare")])
    (task,) = json.loads((tmp_path / "compare" / "compare.json").read_text())["tasks"]
    assert (task["task"], task["num_examples"]) == ("pairs_labels", 20)
    assert [metric["metric"] for metric in task["metrics"]] == ["accuracy"]
    for name, message in (("c", "other data"), ("d", "limit None in A and 7 in B")):
        with pytest.raises(DataError, match=message):
            stmoe.main(["eval", "compare", sides["b"], sides[name], "--out", str(tmp_path / "x")])


def test_a_split_of_a_downloaded_dataset_is_evaluated(tmp_path):
    for split, rows in (("train", PAIRS), ("test", PAIRS[:2])):
        write(tmp_path / f"{split}.jsonl", rows)
    task = read_pairs_task(tmp_path.with_name(f"{tmp_path.name}:test"), tmp_path)
    assert [example.inputs for example in task.examples("validation")] == [
        pair["inputs"] for pair in PAIRS[:2]
    ]
    assert len(task.examples("train")) == len(PAIRS) - 2
    assert (
        hashlib.sha256((tmp_path / "test.jsonl").read_bytes()).hexdigest()[:16]
        in task.source.origin
    )


def test_baselines_see_no_pair_that_is_evaluated(folders, pairs, tmp_path):
    more = [{"inputs": f"colour of {thing}", "targets": colour} for thing, colour in THINGS.items()]
    train = write(tmp_path / "train.jsonl", [*PAIRS, *more])
    task = read_pairs_task(pairs, train)
    assert [example.inputs for example in task.examples("train")] == [
        pair["inputs"] for pair in more
    ]
    out = tmp_path / "out"
    run(
        "--model",
        folders["t5"],
        "--pairs",
        pairs,
        "--train-pairs",
        train,
        "--modes",
        "generate",
        "--out",
        out,
    )
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
        (["--pairs", "{pairs}", "--split", "test"], "--split test cannot be combined"),
        (["--pairs", "{pairs}", "--data", "{folder}"], "--data .* cannot be combined"),
        (["--tasks", "copa", "--train-pairs", "{pairs}"], "would change nothing"),
        (["--pairs", "{folder}"], "is not a file"),
        (["--pairs", "{pairs}x"], "is not a file"),
        (["--pairs", "{pairs}", "--train-pairs", "{pairs}x"], "is not a file"),
        (["--pairs", "{empty}"], "holds no pairs"),
        (["--pairs", "{texts}", "--modes", "rank"], "cannot be evaluated by rank"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(folders, pairs, tmp_path, more, message):
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    texts = write(tmp_path / "texts", [{"inputs": "name", "targets": "the " * 11}])
    places = {
        "pairs": pairs,
        "folder": tmp_path / "folder",
        "empty": tmp_path / "empty",
        "texts": texts,
    }
    words = [word.format_map(places) for word in more]
    with pytest.raises((ConfigError, DataError), match=message):
        run("--model", folders["t5"], *words, "--out", tmp_path / "out")


def test_no_task_of_the_registry_is_called_like_pairs():
    assert not set(PAIR_TASKS) & set(TASKS.names())
