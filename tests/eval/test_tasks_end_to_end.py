"""Every task with fixtures from its rows to its scores, with a tiny model; the registry decides what
is tested.

Oracles: targets given back score 100 on every metric, unparsable or unrelated answers 0, and the
order of the examples changes nothing. WSC is right when a row of label 0 is *not* answered by its
candidate. A pair of AX-g counts as equal when both answers are, right or wrong, so its worst
answers differ within each pair. The worst similarities are mirrored ones, whose correlation is
-100; equal ones have none.
"""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from moe.data.tokenizer import train_tokenizer
from stmoe_eval.answers.batches import requests_of
from stmoe_eval.answers.predict import predict
from stmoe_eval.answers.seq2seq import load_seq2seq
from stmoe_eval.scores.metrics import GENDER_PARITY, MATTHEWS, PEARSON, SPEARMAN
from stmoe_eval.source import EXPORT, HubData
from stmoe_eval.task import TASKS, Example, Task
from tests.eval.rows import FIXTURES, ON_THE_HUB, examples_of

CORRELATIONS = {metric.name for metric in (MATTHEWS, PEARSON, SPEARMAN)}

by_name = pytest.mark.parametrize("name", ON_THE_HUB)


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    texts = []
    for task in map(TASKS.get, ON_THE_HUB):
        texts += [f"{made.inputs} {made.targets}" for made in examples_of(task, task.split)]
    folder = tmp_path_factory.mktemp("model")
    train_tokenizer(texts, 331, folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": 331, "d_model": 29, "d_kv": 5, "d_ff": 31, "num_layers": 2}
    config = T5Config(**sizes, num_heads=3, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(folder)
    return load_seq2seq(folder)


def best(task: Task, examples: list[Example]) -> list[str]:
    """Returns answers that are all right."""
    answers = [example.targets for example in examples]
    if task.name == "wsc":
        for number, example in enumerate(examples):
            if not example.fields["label"]:
                answers[number] = "somebody else"
    return answers


def worst(task: Task, examples: list[Example]) -> list[str]:
    """Returns answers that are all wrong, and unlike each other within a pair of AX-g."""
    if PEARSON in task.metrics:
        return [f"{5 - float(example.targets):.1f}" for example in examples]
    answers = ["" if task.name == "wsc" else "zzz qqq"] * len(examples)
    if GENDER_PARITY in task.metrics:
        for number, example in enumerate(examples[::2]):
            answers[2 * number] = next(c for c in example.choices if c != example.targets)
    return answers


def fixture(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_parquet(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def scores(task: Task, examples: list[Example], outputs: list[str]) -> dict[str, float]:
    targets, answers = task.values(examples, outputs)
    return {metric.name: metric.score(targets, answers) for metric in task.metrics}


# ---- rows ----


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_jsonl_and_parquet_give_the_same_rows(name, tmp_path):
    source = TASKS.get(name).source
    assert isinstance(source, HubData)
    home = FIXTURES / (TASKS.get(name).variant_of or name)
    for split in source.splits:
        write_parquet(tmp_path / f"{split}.parquet", fixture(home / f"{split}.jsonl"))
        assert source.rows(split, tmp_path) == source.rows(split, home)


@pytest.mark.parametrize("name", ["anli_r3", "record", "winogrande_xl"])
def test_a_repository_of_the_hub_gives_the_rows_of_its_files(name, tmp_path, monkeypatch):
    """The repository is a folder that has the shape of the hub's export; `datasets` reads it."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    source = TASKS.get(name).source
    for split in source.splits:
        rows = source.rows(split, FIXTURES / name)
        exported = tmp_path / "repository" / source.config / source.hub_splits.get(split, split)
        write_parquet(exported / "0000.parquet", fixture(FIXTURES / name / f"{split}.jsonl"))
        repository, counts = str(tmp_path / "repository"), {**source.counts, split: len(rows)}
        hub = replace(source, repository=repository, counts=counts, revisions=(EXPORT,))
        assert hub.rows(split) == rows


@pytest.mark.parametrize(
    ("name", "column"), [("arc_easy", "choices"), ("squad", "answers"), ("squad_v2", "answers")]
)
def test_structs_of_lists_and_lists_of_structs_are_the_same(name, column, tmp_path):
    source, split = TASKS.get(name).source, "validation"
    rows = fixture(FIXTURES / name / f"{split}.jsonl")
    for row in rows:
        row[column] = [
            dict(zip(row[column], values, strict=True))
            for values in zip(*row[column].values(), strict=True)
        ]
    (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert source.rows(split, tmp_path) == source.rows(split, FIXTURES / name)


# ---- predictions ----


@by_name
def test_a_model_answers_every_example_in_every_mode_and_is_scored(name, system, tmp_path):
    task = TASKS.get(name)
    task = replace(task, decoding=task.decoding._replace(max_tokens=3))
    examples = examples_of(task, task.split)
    requests = requests_of(examples)
    for mode in ("generate", "rank") if task.choices else ("generate",):
        made = predict(system, task, requests, mode, tmp_path / f"{mode}.jsonl")
        outputs = [prediction.output for prediction in made.predictions]
        assert len(outputs) == len(examples)
        if mode == "rank":
            for output, example in zip(outputs, examples, strict=True):
                assert output in example.choices
        for metric, score in scores(task, examples, outputs).items():
            is_constant = metric in CORRELATIONS and math.isnan(score)
            assert is_constant or (-100 if metric in CORRELATIONS else 0) <= score <= 100


# ---- scores ----


@by_name
def test_perfect_answers_score_100_and_the_worst_0_in_any_order(name):
    task = TASKS.get(name)
    examples = examples_of(task, task.split)
    right, wrong = best(task, examples), worst(task, examples)
    assert 3 <= len(examples) <= 5
    for score in scores(task, examples, right).values():
        assert score == pytest.approx(100)
    lowest = -100.0 if PEARSON in task.metrics else 0.0
    for metric, score in scores(task, examples, wrong).items():
        # Any two sentences share letters, and chrF counts them.
        tolerance = 1.0 if metric == "chrf" else 1e-12
        assert score == pytest.approx(lowest, abs=tolerance)

    # Every third answer is wrong; pairs stay together.
    outputs = [wrong[i] if i % 3 == 0 else right[i] for i in range(len(examples))]
    expected = scores(task, examples, outputs)
    assert 0 < expected[task.metrics[0].name] < 100
    size = 2 if GENDER_PARITY in task.metrics else 1
    units = [list(range(start, start + size)) for start in range(0, len(examples), size)]
    for seed in range(3):
        random.Random(seed).shuffle(units)
        order = [number for unit in units for number in unit]
        shuffled = scores(task, [examples[i] for i in order], [outputs[i] for i in order])
        assert shuffled == pytest.approx(expected, abs=1e-9)

    # The mean of the scores of examples is the score of the task.
    targets, answers = task.values(examples, outputs)
    for metric in task.metrics:
        if metric.score_examples is not None:
            each = metric.score_examples(targets, answers)
            assert each.shape == (len(examples),)
            assert np.nanmean(each) == pytest.approx(metric.score(targets, answers))


# ---- single tasks ----


def test_wsc_trains_on_right_candidates_and_is_evaluated_on_all():
    task = TASKS.get("wsc")
    assert [example.targets for example in examples_of(task, "train")] == ["Sofie", "The crate"]
    assert len(examples_of(task, "validation")) == 4


def test_record_trains_on_every_answer_asks_each_query_once_and_sorts_entities():
    task = TASKS.get("record")
    train = examples_of(task, "train")
    assert [example.targets for example in train] == ["Jon Reed", "Mira Holt", "Holt", "Oslin"]
    assert train[1].inputs == train[2].inputs
    assert train[1].group == train[2].group
    validation = examples_of(task, "validation")
    assert [example.id for example in validation] == ["0/0/0", "0/1/0", "1/2/0"]
    assert validation[0].choices == ("Bergdorf", "Oslin", "Tarn Lake")
    assert "entities: Bergdorf, Oslin, Tarn Lake passage:" in validation[0].inputs
    assert scores(task, validation, ["Tarn Lake", "Bergdorf", "Holt"]) == {"em": 100.0, "f1": 100.0}


def test_arc_keys_may_be_digits_and_choices_three_to_five():
    examples = examples_of(TASKS.get("arc_easy"), "test")
    found = [(example.targets, len(example.choices)) for example in examples]
    assert found == [("B", 4), ("C", 4), ("B", 3), ("C", 5)]
    texts = examples_of(TASKS.get("arc_easy.unifiedqa"), "test")
    assert [example.targets for example in texts] == ["a candle", "water", "flower", "diamond"]
    question = "what freezes at 0 degrees celsius? \\n (a) iron (b) oil (c) water (d) salt"
    assert texts[1].inputs == question


def test_an_arc_key_that_labels_no_choice_is_named(tmp_path):
    choices = {"text": ["a", "b"], "label": ["A", "B"]}
    row = {"id": "q7", "question": "Why?", "choices": choices, "answerKey": "2"}
    (tmp_path / "arc_easy").mkdir()
    (tmp_path / "arc_easy" / "test.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=r"'q7' has answerKey '2' and 2 choices labelled A, B"):
        TASKS.get("arc_easy").examples("test", tmp_path)


def test_anli_and_cb_do_not_share_the_order_of_their_labels():
    labels = {}
    for name in ("cb", "anli_r3"):
        task = TASKS.get(name)
        labels[name] = [example.targets for example in examples_of(task, task.split)[:3]]
    assert labels["cb"] == ["entailment", "contradiction", "neutral"]
    assert labels["anli_r3"] == ["entailment", "neutral", "contradiction"]
    assert TASKS.get("cb").choices != TASKS.get("anli_r3").choices


def test_the_pairs_of_axg_are_two_rows_that_differ_in_a_pronoun():
    examples = examples_of(TASKS.get("axg"), "test")
    assert [example.group for example in examples] == ["0", "0", "1", "1"]
    found = scores(TASKS.get("axg"), examples, ["entailment"] * 4)
    assert found == {"accuracy": 50.0, "gender_parity": 100.0}


def test_squad_v2_counts_an_unanswerable_question_as_the_official_script_does():
    """Right is `unanswerable`, or what normalisation leaves nothing of; every other answer scores 0
    in both.
    """
    task = TASKS.get("squad_v2")
    examples = examples_of(task, "validation")
    targets = [example.targets for example in examples]
    assert targets == ["heron", "unanswerable", "ninety crowns", "unanswerable"]
    overlap = (100 + 0 + 100 * 2 / 3 + 100) / 4
    for outputs, f1, exact in (
        (["unanswerable"] * 4, 50, 50),
        ([""] * 4, 50, 50),
        (["a heron", "The.", "ninety", "heron"], 75, 75),
        (["heron", "the island", "crowns", ""], overlap, 50),
    ):
        expected = {"f1": pytest.approx(f1), "em": exact}
        assert scores(task, examples, outputs) == expected


def test_hidden_labels_are_read_but_have_no_target():
    for name in ("boolq", "record", "winogrande_xl", "winogrande_xl.flan"):
        assert {example.targets for example in examples_of(TASKS.get(name), "test")} == {"<unk>"}


def test_the_beams_and_lengths_are_those_of_t5():
    for name in ("xsum", "cnn_dailymail"):
        assert TASKS.get(name).decoding == (128, 4, 0.6)
        assert (TASKS.get(name).inputs_length, TASKS.get(name).targets_length) == (512, 512)
    assert (TASKS.get("rte").inputs_length, TASKS.get("rte").targets_length) == (512, 62)
    assert TASKS.get("squad").targets_length == 97
    assert TASKS.get("rte").decoding == (128, 1, 0.0)


SENTENCE = "The shelf broke under the vase since the _ was weak."
PREMISE = "Mei Tan opened a workshop for clocks in Split in 1953 and sold it nine years later."
HYPOTHESIS = "There was a workshop in Split."
PROMPTS = {
    "winogrande_xl": (f"winogrande option1: shelf option2: vase sentence: {SENTENCE}", "option1"),
    "winogrande_xl.unifiedqa": (f"{SENTENCE.lower()} \\n (a) shelf (b) vase", "shelf"),
    "winogrande_xl.rainbow": (
        f"[winogrande]:\n<sentence>{SENTENCE}</sentence>\n<option1>shelf</option1>\n<option2>vase</option2>",
        "1",
    ),
    "winogrande_xl.flan": (
        "How does the sentence end?\n\nThe shelf broke under the vase since the \n\n"
        "OPTIONS:\n- shelf was weak.\n- vase was weak.",
        "shelf was weak.",
    ),
    "anli_r3": (f"anli_r3 hypothesis: {HYPOTHESIS} premise: {PREMISE}", "entailment"),
    "anli_r3.gpt3": (
        f"{PREMISE}\nQuestion: {HYPOTHESIS} True, False, or Neither?\nAnswer:",
        "True",
    ),
    "anli_r3.flan": (
        f'{PREMISE}\n\nBased on the paragraph above can we conclude that "{HYPOTHESIS}"?\n\n'
        "OPTIONS:\n- Yes\n- It's impossible to say\n- No",
        "Yes",
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_the_prompts_of_this_library_and_their_variants(name):
    example = examples_of(TASKS.get(name), TASKS.get(name).split)[0]
    assert (example.inputs, example.targets) == PROMPTS[name]
