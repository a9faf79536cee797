"""Baselines on data of which it is known beforehand what each can tell."""

import dataclasses

import pytest

from moe.data.pair_files import Pair
from stmoe_eval.baselines import classifiers
from stmoe_eval.baselines.classifiers import BaselineData, baseline_outputs, has_baselines
from stmoe_eval.baselines.texts import answer_texts
from stmoe_eval.scores.metrics import ROUGE1
from stmoe_eval.task import Example

TRAIN = [
    Pair("de: Greece", "Griechenland"),
    Pair("de: Greek", "Griechisch"),
    Pair("de: Finland", "Finnland"),
    Pair("nl: Greece", "Griekenland"),
    Pair("nl: Finland", "Finland"),
    Pair("nl: Peru", "Peru"),
    Pair("sv: Finland", "Finland"),
    Pair("sv: Peru", "Peru"),
    Pair("sv: Greece", "Grekland"),
]


def examples_of(*pairs):
    return [Example(str(n), str(n), *pair[:2], (), {}) for n, pair in enumerate(pairs)]


def answers(task, train, test):
    return baseline_outputs(task, BaselineData(train), test)


@pytest.fixture
def summaries(task):
    return dataclasses.replace(task, choices=(), metrics=(ROUGE1,))


def test_a_classification_learns_separable_words_and_majority_counts(task):
    examples = task.examples("train")
    outputs = answers(task, examples, examples)
    assert list(outputs) == ["majority", "naive Bayes", "logistic regression"]
    assert set(outputs["majority"]) == {"red"}
    for name in ("naive Bayes", "logistic regression"):
        assert outputs[name] == [example.targets for example in examples]


def test_the_lead_of_a_summary_is_the_first_sentence_whatever_the_reference(summaries):
    text = "summarize: Noise about it. The key is here!"
    test = examples_of((text, "<unk>"), ("summarize: only one sentence", "one"))
    assert answers(summaries, test, test) == {"lead": ["Noise about it.", "only one sentence"]}


def test_other_tasks_no_training_examples_and_huge_ones_have_no_baselines(
    task, summaries, monkeypatch
):
    examples = task.examples("train")
    other = dataclasses.replace(task, choices=len)
    assert not has_baselines(other)
    assert answers(summaries, [], examples) == {}

    size = sum(len(example.inputs) for example in examples)
    monkeypatch.setattr(classifiers, "MAX_CHARACTERS", size - 1)
    assert answers(task, examples, examples) == {}


# ---- free text ----


def test_copy_answers_what_follows_the_prefix_and_no_baseline_looks_at_the_targets(task):
    free = dataclasses.replace(task, choices=())
    inputs = ["de: Peru", "Peru", "de: Chad: north", "de:", "de: "]
    outputs = answers(free, examples_of(*TRAIN), examples_of(*((text, "<unk>") for text in inputs)))
    assert list(outputs) == ["copy", "most similar", "nearest prefix"]
    assert outputs["copy"] == ["Peru", "Peru", "Chad: north", "de:", "de: "]


def test_most_similar_takes_the_nearest_letters_of_the_same_prefix_if_it_was_trained():
    inputs = ["de: Grecia", "nl: Greek", "fi: Greeks", "sv: Finlandia"]
    expected = ["Griechenland", "Griekenland", "Griechisch", "Finland"]
    assert answer_texts(TRAIN, inputs)["most similar"] == expected

    # Many inputs are compared in parts.
    train = [Pair(f"thing {number} {number}", f"word {number}") for number in range(40)]
    inputs = [f"thing {number % 40} {number % 40}" for number in range(600)]
    expected = [f"word {number % 40}" for number in range(600)]
    assert answer_texts(train, inputs)["most similar"] == expected


def test_nearest_prefix_is_the_one_with_the_most_equal_targets_that_has_the_text():
    """Dutch and Swedish share two names of three; German has the first text of both."""
    train = [*TRAIN, Pair("de: Chad", "Tschad"), Pair("sv: Chad", "Tchad")]
    inputs = ["nl: Chad", "de: Peru", "fi: Greece", "nl: Togo"]
    found = answer_texts(train, inputs)["nearest prefix"]
    assert found == ["Tchad", "Peru", "Griechenland", "Togo"]

    # Without a text after two prefixes there is none.
    train = [Pair("de: Greece", "Griechenland"), Pair("nl: Peru", "Peru"), Pair("Chad", "Tchad")]
    assert list(answer_texts(train, ["nl: Greece"])) == ["copy", "most similar"]
