"""Baselines on data that words separate, so that the answers are known beforehand."""

import dataclasses

import pytest

from stmoe_eval.baselines import classifiers
from stmoe_eval.baselines.classifiers import BaselineData, baseline_outputs, has_baselines
from stmoe_eval.scores.metrics import ROUGE1
from stmoe_eval.task import Example


def example(number, inputs, targets):
    return Example(str(number), str(number), inputs, targets, (), {})


def answers(task, train, test):
    return baseline_outputs(task, BaselineData(train), test)


@pytest.fixture
def summaries(task):
    return dataclasses.replace(task, choices=(), metrics=(ROUGE1,))


@pytest.fixture
def bodies():
    """The best sentence has the word "key", and stands second or third."""
    made = []
    for i in range(13):
        first, key, more = f"Noise about thing{i}.", f"The key is word{i}.", f"More of thing{i}!"
        text = f"{first} {more} {key}" if i % 2 else f"{first} {key} {more}"
        made.append(example(i, f"summarize: {text}", f"the key: word{i}"))
    return made


def test_a_classification_learns_separable_words_and_majority_counts(task):
    examples = task.examples("train")
    outputs = answers(task, examples, examples)
    assert list(outputs) == ["majority", "naive Bayes", "logistic regression"]
    assert set(outputs["majority"]) == {"red"}
    for name in ("naive Bayes", "logistic regression"):
        assert outputs[name] == [example.targets for example in examples]


def test_sentence_pickers_find_the_word_that_marks_the_best_sentence_and_lead_takes_the_first(
    summaries, bodies
):
    train, test = bodies[:9], bodies[9:]
    outputs = answers(summaries, train, test)
    assert list(outputs) == ["majority", "lead", "naive Bayes", "logistic regression"]
    assert outputs["lead"] == [f"Noise about thing{i}." for i in range(9, 13)]
    for name in ("naive Bayes", "logistic regression"):
        assert outputs[name] == [f"The key is word{i}." for i in range(9, 13)]

    # The references of the test split are not looked at.
    blind = [example._replace(targets="<unk>", fields={}) for example in test]
    assert answers(summaries, train, blind) == outputs


def test_sentence_pickers_learn_a_place_where_words_say_nothing(summaries):
    def text(i):
        return f"summarize: a{i} b{i} c{i}. d{i} e{i} f{i}. g{i} h{i} k{i}."

    train = [example(i, text(i), f"g{i} h{i} k{i}.") for i in range(7)]
    outputs = answers(summaries, train, [example(0, text(99), "")])
    for name in ("naive Bayes", "logistic regression"):
        assert outputs[name] == ["g99 h99 k99."]


@pytest.mark.parametrize(
    ("targets", "majority"),
    [
        (["rare one", "the key", "the key", "the lock"], "the key"),
        (["far off", "the red key", "the red", "the lock"], "the red"),
    ],
)
def test_the_majority_summary_is_the_most_frequent_and_of_equals_that_most_like_the_others(
    summaries, targets, majority
):
    train = [example(i, "summarize: a body.", target) for i, target in enumerate(targets)]
    assert answers(summaries, train, train[:2])["majority"] == [majority] * 2


def test_other_tasks_no_training_examples_and_huge_ones_have_no_baselines(
    task, summaries, bodies, monkeypatch
):
    other = dataclasses.replace(task, choices=len)
    assert not has_baselines(other)
    assert answers(other, bodies, bodies) == {}
    assert answers(summaries, [], bodies) == {}
    short = [example(i, f"summarize: only sentence {i}", "one") for i in range(3)]
    assert list(answers(summaries, short, short)) == ["majority", "lead"]

    size = sum(len(example.inputs) for example in bodies)
    monkeypatch.setattr(classifiers, "MAX_CHARACTERS", size - 1)
    assert answers(summaries, bodies, bodies) == {}
