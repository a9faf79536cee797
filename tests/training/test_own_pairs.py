"""Own pairs: which are held out, which metrics fit, and a run that is scored by them.

Oracles: sets of the user's pairs; scores by hand; `stmoe eval run --pairs` on the saved model; the
run that was never stopped.
"""

import json
import shutil
from itertools import islice, product

import pytest

import moe.training.pair_scores
import stmoe
from moe import ConfigError, DataError
from moe.commands import finetune
from moe.data.pair_files import Pair, hold_out, read_pairs
from moe.data.tokenizer import train_tokenizer
from moe.training.command import typed_settings
from moe.training.pair_scores import (
    dev_scorer,
    exact_matches,
    kind_of_targets,
    rouge_fmeasures,
    scorers_for,
    word_f1s,
)
from tests.models.tiny import tiny_model
from tests.processes import start_torchrun
from tests.training.test_finetune_command import losses

SYLLABLES = ["ba", "ko", "mi", "ter", "lan", "su", "ver"]
WORDS = ["".join(parts) for parts in islice(product(SYLLABLES, repeat=3), 41)]
PAIRS = [Pair(f"{word} ti", SYLLABLES[number % 3]) for number, word in enumerate(WORDS)]
FEW = ["--training.steps", 6, "--training.evaluate_every", 3, "--training.checkpoint_every", 2]
FEW += ["--optim.cooldown_steps", 0, "--training.batch_size", 4]


def write_pairs(path, pairs):
    lines = []
    for pair in pairs:
        record = {name: value for name, value in pair._asdict().items() if value is not None}
        lines.append(json.dumps(record) + "\n")
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model that drops no token, and pairs."""
    folder = tmp_path_factory.mktemp("inputs")
    model = folder / "model"
    train_tokenizer([" ".join([*WORDS, "ti"] * 9)], 131, model)
    even = {"num_experts": 4, "num_heads": 4, "d_ff": 32, "group_size": 16}
    tiny_model(vocab_size=131, **even).save_pretrained(model)
    return {"model": model, "pairs": write_pairs(folder / "pairs.jsonl", PAIRS)}


def words(inputs, out, *more, train=None):
    paths = ["--pretrained", inputs["model"], "--train", train or inputs["pairs"], "--out", out]
    return [str(word) for word in (*paths, *FEW, *more)]


def tune(inputs, out, *more, train=None):
    finetune.main(words(inputs, out, *more, train=train))
    return out


@pytest.fixture(scope="module")
def straight(inputs, tmp_path_factory):
    return tune(inputs, tmp_path_factory.mktemp("straight") / "run")


# ---- which pairs are held out ----


def test_every_pair_is_trained_on_or_scored_and_a_tenth_is_scored():
    train, dev = hold_out(PAIRS, 0.1)
    assert len(dev) == 4
    assert sorted(train + dev) == sorted(PAIRS)
    assert (train, dev) == hold_out(PAIRS, 0.1)
    assert hold_out(PAIRS, 0) == (PAIRS, [])
    assert len(hold_out(PAIRS, 0.001)[1]) == 1


def test_pairs_of_one_group_or_one_input_are_never_divided():
    groups = [Pair(word, "x", group=str(number // 5)) for number, word in enumerate(WORDS)]
    repeated = [Pair(word, target) for word in WORDS for target in ("x", "y")]
    for pairs, name in ((groups, "group"), (repeated, "inputs")):
        for share in (0.01, 0.3, 0.7):
            train, dev = hold_out(pairs, share)
            assert dev and train
            assert not {getattr(pair, name) for pair in train} & {getattr(p, name) for p in dev}


def test_a_share_that_leaves_nothing_to_train_on_is_refused():
    for pairs in (PAIRS[:1], [Pair("same", word) for word in WORDS]):
        with pytest.raises(DataError, match="leaves none to train on"):
            hold_out(pairs, 0.1)


def test_a_group_is_a_text_or_an_integer(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"inputs": "a", "targets": "b", "group": 7}\n')
    assert read_pairs(path) == [Pair("a", "b", "7")]
    path.write_text('{"inputs": "a", "targets": "b", "group": [7]}\n')
    with pytest.raises(DataError, match=r"line 1: group is \[7\]"):
        read_pairs(path)


# ---- which metrics fit ----


def test_the_targets_decide_the_metrics():
    sentence = " ".join(WORDS[:11])
    assert kind_of_targets(["a", "b", "a", "b", "c"]) == "labels"
    assert kind_of_targets(["a", "b", "a", "c", "d"]) == "answers"
    assert kind_of_targets(WORDS) == "answers"
    assert kind_of_targets([f"{sentence} {word}" for word in WORDS]) == "texts"
    assert kind_of_targets(["only one"]) == "answers"
    russian = [f"{'Лист ' * 11}{word}" for word in WORDS]
    assert kind_of_targets(russian) == "answers", "ROUGE would read none of their letters"


def test_targets_are_compared_in_the_form_that_a_vocabulary_writes():
    # The third character is unknown: no answer has it.
    targets = ["m²", "m³", "five €", "\ufb01ne\u200bday"]
    answers = ["m2", "m3", "five", "fine day"]
    assert exact_matches(targets, answers) == [1, 1, 0, 1]
    assert word_f1s(targets, answers) == [1, 1, pytest.approx(2 / 3), 1]
    assert exact_matches(answers, ["m2", "m3", "five", "fine  day "]) == [1, 1, 1, 1]


def test_the_f1_counts_shared_words():
    targets = ["a b", "a b", "a a b", "", "a"]
    answers = ["b a", "a c", "a", "", ""]
    assert word_f1s(targets, answers) == [1, 0.5, 0.5, 1, 0]


def test_rouge_reads_sentences_line_by_line_and_its_package_may_be_missing(monkeypatch):
    pytest.importorskip("rouge_score")
    assert rouge_fmeasures("rougeLsum", ["a b c\nd e f"], ["d e \uff46 . a b c"]) == [1]
    texts = [" ".join([word] * 11) for word in WORDS]
    assert list(scorers_for(texts)[0]) == ["rouge1", "rouge2", "rougeLsum"]
    monkeypatch.setattr(moe.training.pair_scores, "find_spec", lambda name: None)
    scorers, sentence = scorers_for(texts)
    assert list(scorers) == ["exact_match", "f1"]
    assert "stmoe[eval]" in sentence


# ---- what the command refuses, and says ----


REFUSED = {
    (
        "--train",
        "{pairs}",
        "--dev",
        "{pairs}",
        "--dev_share",
        "0.2",
    ): "cannot be combined with --dev",
    ("--train", "{pairs}", "--dev_share", "1"): "--dev_share",
    ("--train", "{pairs}", "--dev_share", "nan"): "dev_share",
    ("--train", "{pairs}", "--dev", "{pairs}x"): "cannot be read",
    ("--task", "copa", "--dev", "{pairs}"): "--dev cannot be combined with tasks",
}


@pytest.mark.parametrize("options", REFUSED)
def test_options_that_contradict_each_other_are_refused(inputs, tmp_path, options):
    argv = ["--pretrained", str(inputs["model"]), "--out", str(tmp_path / "run")]
    argv += [word.format(pairs=inputs["pairs"]) for word in options]
    with pytest.raises((ConfigError, DataError), match=REFUSED[options]):
        finetune.main(argv)
    assert not (tmp_path / "run").exists()


def test_without_a_recipe_pairs_have_their_own():
    argv = ["--train", "pairs.jsonl", "--optim.lr", "0.3"]
    chosen = finetune.with_recipe_for_pairs(argv)
    assert "config" in typed_settings(chosen) and chosen[-4:] == argv
    for argv in (
        ["--train=x", "--config=y"],
        ["--task", "copa"],
        ["--config", "y", "--train", "x"],
    ):
        assert finetune.with_recipe_for_pairs(argv) == argv


@pytest.mark.slow
def test_shared_inputs_and_empty_targets_are_counted(inputs, tmp_path, capsys):
    train = write_pairs(tmp_path / "train.jsonl", [*PAIRS[:5], Pair("ba", ""), Pair("ko", " ")])
    tune(inputs, tmp_path / "run", "--dev", inputs["pairs"], train=train)
    captured = capsys.readouterr()
    assert "5 of 41 dev pairs have an input that is also in" in captured.err
    assert "2 of 7 targets are empty" in captured.err
    assert "Dev scores: 41 of 41 pairs" in captured.out and "accuracy" in captured.out


@pytest.mark.slow
def test_a_few_pairs_are_all_trained_on(inputs, tmp_path, capsys):
    train = write_pairs(tmp_path / "train.jsonl", PAIRS[:19])
    out = tune(inputs, tmp_path / "run", train=train)
    assert "19 pairs, none held out" in capsys.readouterr().out
    assert (out / "model").is_dir() and not (out / "best").exists()


# ---- a run ----


def test_the_held_out_pairs_are_those_that_are_scored(straight):
    dev = read_pairs(straight / "dev" / "pairs.jsonl")
    assert dev == hold_out(PAIRS, 0.1)[1]
    for step in (3, 6):
        lines = (straight / f"dev/step_{step:08d}/answers.jsonl").read_text().splitlines()
        answered = [json.loads(line) for line in lines]
        assert [(line["inputs"], line["targets"]) for line in answered] == [
            pair.texts for pair in dev
        ]
        hits = sum(line["answer"].split() == line["targets"].split() for line in answered)
        scores = json.loads((straight / f"dev/step_{step:08d}/scores.json").read_text())
        assert scores["mean"] == 100 * hits / len(dev)


def test_scores_are_those_of_an_evaluation_of_the_saved_model(inputs, straight, tmp_path):
    """On all pairs, some of which the model answers."""
    scores = dev_scorer(PAIRS, 512, None, "cpu")(straight / "model", tmp_path / "dev" / "step")
    argv = ["run", "--model", straight / "model", "--pairs", inputs["pairs"]]
    argv += ["--modes", "generate", "--out", tmp_path / "eval"]
    stmoe.main(["eval", *map(str, argv)])
    (task,) = json.loads((tmp_path / "eval" / "report.json").read_text())["tasks"]
    by_metric = {score["metric"]: score["value"] for score in task["systems"][0]["scores"]}
    assert by_metric == {"accuracy": pytest.approx(scores["pairs/accuracy"])}
    assert scores["mean"] == scores["pairs/accuracy"]


@pytest.mark.slow
def test_a_run_that_was_stopped_has_the_same_scores_and_other_dev_pairs_are_refused(
    inputs, straight, tmp_path
):
    stopped = tmp_path / "stopped"
    shutil.copytree(straight, stopped)
    for folder in ("model", "checkpoints/step_00000006", "dev/step_00000006"):
        shutil.rmtree(stopped / folder)
    tune(inputs, stopped, "--resume")
    assert losses(stopped) == losses(straight)
    for file in ("best/scores.json", "dev/step_00000006/scores.json", "dev/pairs.jsonl"):
        assert (stopped / file).read_bytes() == (straight / file).read_bytes()
    for more in (("--dev_share", 0.3), ("--dev_share", 0), ("--dev", inputs["pairs"])):
        with pytest.raises(DataError, match="dev pairs differ"):
            tune(inputs, stopped, "--resume", *more)


@pytest.mark.slow
def test_ranks_score_as_one_process_does(inputs, tmp_path):
    out = tmp_path / "run"
    rows = ["--data.pack", "true", "--data.inputs_length", 16, "--data.targets_length", 8]
    rows += ["--training.micro_batch_size", 2, "--mesh.ep", 2]
    process = start_torchrun(2, "stmoe", "finetune", *words(inputs, out, *rows))
    ended = process.finish()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("Best on dev: step") == 1
    pairs = read_pairs(out / "dev" / "pairs.jsonl")
    scores = dev_scorer(pairs, 16, None, "cpu")(out / "model", tmp_path / "dev" / "step")
    saved = json.loads((out / "dev/step_00000006/scores.json").read_text())
    assert saved == {"step": 6, **scores}
    answers = (tmp_path / "dev/step/answers.jsonl").read_text()
    assert (out / "dev/step_00000006/answers.jsonl").read_text() == answers
