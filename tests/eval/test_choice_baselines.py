"""Baselines of a choice of words, on questions of which it is known what each can tell."""

import dataclasses

from eval.baselines.choices import best_choices, choose_words
from eval.baselines.classifiers import has_baselines
from eval.task import Example


def example(inputs: str, targets: str, *choices: str) -> Example:
    return Example(inputs, inputs, inputs, targets, choices or (targets,), {})


def answers_of(train: list[Example], test: list[Example]) -> dict[str, list[str]]:
    return {name: best_choices(scores) for name, scores in choose_words(train, test).items()}


TRAIN = [
    example("a beast of the sea", "wolffish"),
    example("a dish of the oven", "applecake"),
    example("a hammer of the smith", "sledge"),
]


def test_each_baseline_uses_what_it_may_and_ties_go_to_the_first():
    test = [
        example("one more beast of the sea", "catfish", "catfish", "pancake", "sleigh"),
        example("one more dish of the oven", "pancake", "catfish", "pancake", "sleigh"),
        example("somebody who pans a cake", "pancake", "catfish", "pancake", "sleigh"),
    ]
    answers = answers_of(TRAIN, test)
    assert answers["majority"] == ["catfish"] * 3
    assert answers["nearest example"][:2] == ["catfish", "pancake"]
    assert answers["spelling"][2] == "pancake"


def test_the_majority_prefers_what_is_often_trained():
    test = [example("x", "b", "c", "b", "a")]
    assert answers_of([example("y", "b")], test)["majority"] == ["b"]
    assert answers_of([example("y", "z")], test)["majority"] == ["a"]


def test_many_questions_are_compared_in_parts():
    train = [example(f"thing number {i}", f"word{i}x") for i in range(40)]
    test = [
        example(f"number {i % 40}", f"word{i % 40}x", "unlike", f"word{i % 40}x")
        for i in range(600)
    ]
    assert answers_of(train, test)["nearest example"] == [item.targets for item in test]


def test_only_tasks_that_say_so_have_them(task):
    free = dataclasses.replace(task, choices=())
    assert not has_baselines(free)
    assert has_baselines(dataclasses.replace(free, has_lexical_choices=True))
