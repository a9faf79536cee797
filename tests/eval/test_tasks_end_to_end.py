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

from eval.answers.batches import Request
from eval.answers.predict import predict
from eval.answers.seq2seq import load_seq2seq
from eval.scores.metrics import GENDER_PARITY, MATTHEWS, PEARSON, SPEARMAN
from eval.source import EXPORT, HubData
from eval.task import TASKS, Example, Task
from moe.data.tokenizer import train_tokenizer
from tests.eval.rows import FIXTURES, FROM_FILES, ON_THE_HUB, examples_of

CORRELATIONS = {metric.name for metric in (MATTHEWS, PEARSON, SPEARMAN)}

by_name = pytest.mark.parametrize("name", FROM_FILES)


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    tasks = [TASKS.get(name) for name in FROM_FILES]
    texts = [
        f"{made.inputs} {made.targets}" for task in tasks for made in examples_of(task, task.split)
    ]
    folder = tmp_path_factory.mktemp("model")
    train_tokenizer(texts, 331, folder)
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=331,
        d_model=29,
        d_kv=5,
        d_ff=31,
        num_layers=2,
        num_heads=3,
        decoder_start_token_id=0,
    )
    T5ForConditionalGeneration(config).save_pretrained(folder)
    return load_seq2seq(folder)


def best(task: Task, examples: list[Example]) -> list[str]:
    """Returns answers that are all right."""
    if task.name == "wsc":
        return [
            example.targets if example.fields["label"] else "somebody else" for example in examples
        ]
    return [example.targets for example in examples]


def worst(task: Task, examples: list[Example]) -> list[str]:
    """Returns answers that are all wrong, and unlike each other within a pair of AX-g."""
    if PEARSON in task.metrics:
        return [f"{5 - float(example.targets):.1f}" for example in examples]
    answers = ["" if task.name == "wsc" else "zzz qqq"] * len(examples)
    if GENDER_PARITY in task.metrics:
        for number in range(0, len(examples), 2):
            wrong = [
                choice for choice in examples[number].choices if choice != examples[number].targets
            ]
            answers[number] = wrong[0]
    return answers


def fixture(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def scores(task: Task, examples: list[Example], outputs: list[str]) -> dict[str, float]:
    targets, answers = task.values(examples, outputs)
    return {metric.name: metric.score(targets, answers) for metric in task.metrics}


# ---- rows ----


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_jsonl_parquet_and_a_repository_of_the_hub_give_the_same_rows(name, tmp_path, monkeypatch):
    """The repository is a folder that has the shape of the hub's export; `datasets` reads it."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    source = TASKS.get(name).source
    assert isinstance(source, HubData)
    home = FIXTURES / (TASKS.get(name).variant_of or name)
    for split in source.splits:
        rows = source.rows(split, home)
        table = pyarrow.Table.from_pylist(fixture(home / f"{split}.jsonl"))
        pyarrow.parquet.write_table(table, tmp_path / f"{split}.parquet")
        assert source.rows(split, tmp_path) == rows
        exported = tmp_path / "repository" / source.config / source.hub_splits.get(split, split)
        exported.mkdir(parents=True)
        pyarrow.parquet.write_table(table, exported / "0000.parquet")
        counts = {**source.counts, split: len(rows)}
        hub = replace(
            source, repository=str(tmp_path / "repository"), counts=counts, revisions=(EXPORT,)
        )
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
    task = replace(task, decoding=task.decoding._replace(max_tokens=5))
    examples = examples_of(task, task.split)
    requests = [Request(example.id, example.inputs, example.choices) for example in examples]
    for mode in ("generate", "rank") if task.choices else ("generate",):
        made = predict(system, task, requests, mode, tmp_path / f"{mode}.jsonl")
        outputs = [prediction.output for prediction in made.predictions]
        assert len(outputs) == len(examples)
        if mode == "rank":
            assert all(
                output in example.choices for output, example in zip(outputs, examples, strict=True)
            )
        for metric, score in scores(task, examples, outputs).items():
            is_constant = metric in CORRELATIONS and math.isnan(score)
            assert is_constant or (-100 if metric in CORRELATIONS else 0) <= score <= 100


# ---- scores ----


@by_name
def test_perfect_answers_score_100_and_the_worst_0(name):
    task = TASKS.get(name)
    examples = examples_of(task, task.split)
    assert 3 <= len(examples) <= 5
    for score in scores(task, examples, best(task, examples)).values():
        assert score == pytest.approx(100)
    lowest = -100.0 if PEARSON in task.metrics else 0.0
    for metric, score in scores(task, examples, worst(task, examples)).items():
        # Any two sentences share letters, and chrF counts them.
        tolerance = 1.0 if metric == "chrf" else 1e-12
        assert score == pytest.approx(lowest, abs=tolerance)


@by_name
def test_each_score_counts_for_itself_and_the_order_does_not_matter(name):
    task = TASKS.get(name)
    examples = examples_of(task, task.split)
    outputs = [
        (good if number % 3 else bad)
        for number, (good, bad) in enumerate(
            zip(best(task, examples), worst(task, examples), strict=True)
        )
    ]
    expected = scores(task, examples, outputs)
    size = 2 if GENDER_PARITY in task.metrics else 1  # pairs stay together
    units = [list(range(start, start + size)) for start in range(0, len(examples), size)]
    for seed in range(5):
        random.Random(seed).shuffle(units)
        order = [number for unit in units for number in unit]
        shuffled = scores(task, [examples[i] for i in order], [outputs[i] for i in order])
        assert shuffled == pytest.approx(expected, abs=1e-9)
    assert 0 < expected[task.metrics[0].name] < 100


@by_name
def test_scores_of_examples_have_the_score_of_the_task_as_their_mean(name):
    task = TASKS.get(name)
    examples = examples_of(task, task.split)
    targets, answers = task.values(
        examples, [*best(task, examples)[:2], *worst(task, examples)[2:]]
    )
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
    assert [(example.targets, len(example.choices)) for example in examples] == [
        ("B", 4),
        ("C", 4),
        ("B", 3),
        ("C", 5),
    ]
    texts = examples_of(TASKS.get("arc_easy.unifiedqa"), "test")
    assert [example.targets for example in texts] == ["a candle", "water", "flower", "diamond"]
    assert (
        texts[1].inputs
        == "what freezes at 0 degrees celsius? \\n (a) iron (b) oil (c) water (d) salt"
    )


def test_an_arc_key_that_labels_no_choice_is_named(tmp_path):
    row = {
        "id": "q7",
        "question": "Why?",
        "choices": {"text": ["a", "b"], "label": ["A", "B"]},
        "answerKey": "2",
    }
    (tmp_path / "arc_easy").mkdir()
    (tmp_path / "arc_easy" / "test.jsonl").write_text(json.dumps(row))
    with pytest.raises(
        ValueError,
        match=r"question 'q7' has answerKey '2' and 2 choices labelled A, B; expected one",
    ):
        TASKS.get("arc_easy").examples("test", tmp_path)


def test_anli_and_cb_do_not_share_the_order_of_their_labels():
    labels = {
        name: examples_of(TASKS.get(name), TASKS.get(name).split)[:3] for name in ("cb", "anli_r3")
    }
    assert [example.targets for example in labels["cb"]] == [
        "entailment",
        "contradiction",
        "neutral",
    ]
    assert [example.targets for example in labels["anli_r3"]] == [
        "entailment",
        "neutral",
        "contradiction",
    ]
    assert TASKS.get("cb").choices != TASKS.get("anli_r3").choices


def test_the_pairs_of_axg_are_two_rows_that_differ_in_a_pronoun():
    examples = examples_of(TASKS.get("axg"), "test")
    assert [example.group for example in examples] == ["0", "0", "1", "1"]
    constant = ["entailment"] * 4
    assert scores(TASKS.get("axg"), examples, constant) == {
        "accuracy": 50.0,
        "gender_parity": 100.0,
    }


def test_squad_v2_counts_an_unanswerable_question_as_the_official_script_does():
    """Right is `unanswerable`, or what normalisation leaves nothing of; every other answer scores 0
    in both.
    """
    task = TASKS.get("squad_v2")
    examples = examples_of(task, "validation")
    assert [example.targets for example in examples] == [
        "heron",
        "unanswerable",
        "ninety crowns",
        "unanswerable",
    ]
    assert scores(task, examples, ["unanswerable"] * 4) == {"f1": 50.0, "em": 50.0}
    assert scores(task, examples, [""] * 4) == {"f1": 50.0, "em": 50.0}
    assert scores(task, examples, ["a heron", "The.", "ninety", "heron"]) == {
        "f1": 75.0,
        "em": 75.0,
    }
    assert scores(task, examples, ["heron", "the island", "crowns", ""]) == {
        "f1": pytest.approx((100 + 0 + 100 * 2 / 3 + 100) / 4),
        "em": 50.0,
    }


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


def test_the_prompts_of_this_library_and_their_variants():
    def first(name: str) -> tuple[str, str]:
        example = examples_of(TASKS.get(name), TASKS.get(name).split)[0]
        return example.inputs, example.targets

    sentence = "The shelf broke under the vase since the _ was weak."
    assert first("winogrande_xl") == (
        f"winogrande option1: shelf option2: vase sentence: {sentence}",
        "option1",
    )
    assert first("winogrande_xl.unifiedqa") == (
        f"{sentence.lower()} \\n (a) shelf (b) vase",
        "shelf",
    )
    assert first("winogrande_xl.rainbow") == (
        f"[winogrande]:\n<sentence>{sentence}</sentence>\n<option1>shelf</option1>\n<option2>vase</option2>",
        "1",
    )
    assert first("winogrande_xl.flan") == (
        "How does the sentence end?\n\nThe shelf broke under the vase since the \n\n"
        "OPTIONS:\n- shelf was weak.\n- vase was weak.",
        "shelf was weak.",
    )
    premise = "Mei Tan opened a workshop for clocks in Split in 1953 and sold it nine years later."
    hypothesis = "There was a workshop in Split."
    assert first("anli_r3") == (
        f"anli_r3 hypothesis: {hypothesis} premise: {premise}",
        "entailment",
    )
    assert first("anli_r3.gpt3") == (
        f"{premise}\nQuestion: {hypothesis} True, False, or Neither?\nAnswer:",
        "True",
    )
    assert first("anli_r3.flan") == (
        f'{premise}\n\nBased on the paragraph above can we conclude that "{hypothesis}"?\n\n'
        "OPTIONS:\n- Yes\n- It's impossible to say\n- No",
        "Yes",
    )
