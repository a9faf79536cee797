"""Baselines of free text, on names of which it is known what each can tell."""

import dataclasses

from moe.data.pair_files import Pair
from stmoe_eval.baselines.classifiers import BaselineData, baseline_outputs
from stmoe_eval.baselines.texts import answer_texts
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


def test_copy_answers_what_follows_the_prefix():
    inputs = ["de: Peru", "Peru", "de: Chad: north", "de:", "de: "]
    assert answer_texts(TRAIN, inputs)["copy"] == ["Peru", "Peru", "Chad: north", "de:", "de: "]


def test_most_similar_takes_the_nearest_letters_of_the_same_prefix_if_it_was_trained():
    inputs = ["de: Grecia", "nl: Greek", "fi: Greeks", "sv: Finlandia"]
    assert answer_texts(TRAIN, inputs)["most similar"] == [
        "Griechenland",
        "Griekenland",
        "Griechisch",
        "Finland",
    ]


def test_nearest_prefix_is_the_one_with_the_most_equal_targets_that_has_the_text():
    """Dutch and Swedish share two names of three; German has the first text of both."""
    train = [*TRAIN, Pair("de: Chad", "Tschad"), Pair("sv: Chad", "Tchad")]
    inputs = ["nl: Chad", "de: Peru", "fi: Greece", "nl: Togo"]
    answers = answer_texts(train, inputs)["nearest prefix"]
    assert answers == ["Tchad", "Peru", "Griechenland", "Togo"]


def test_without_a_text_after_two_prefixes_there_is_no_nearest_one():
    train = [Pair("de: Greece", "Griechenland"), Pair("nl: Peru", "Peru"), Pair("Chad", "Tchad")]
    assert list(answer_texts(train, ["nl: Greece"])) == ["copy", "most similar"]


def test_many_inputs_are_compared_in_parts():
    train = [Pair(f"thing {number} {number}", f"word {number}") for number in range(40)]
    inputs = [f"thing {number % 40} {number % 40}" for number in range(600)]
    expected = [f"word {number % 40}" for number in range(600)]
    assert answer_texts(train, inputs)["most similar"] == expected


def test_tasks_of_free_text_have_them_and_never_look_at_the_targets_asked_for(task):
    free = dataclasses.replace(task, choices=())
    train = [Example(pair.inputs, "", *pair.texts, (), {}) for pair in TRAIN]
    test = [Example("1", "", "de: Peru", "<unk>", (), {})]
    outputs = baseline_outputs(free, BaselineData(train), test)
    assert list(outputs) == ["copy", "most similar", "nearest prefix"]
    assert outputs["copy"] == outputs["nearest prefix"] == ["Peru"]
