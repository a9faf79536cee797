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


def test_a_classification_learns_separable_words_and_majority_counts(task):
    examples = task.examples("train")
    outputs = answers(task, examples, examples)
    assert list(outputs) == ["majority", "naive Bayes", "logistic regression"]
    assert set(outputs["majority"]) == {"red"}
    for name in ("naive Bayes", "logistic regression"):
        assert outputs[name] == [example.targets for example in examples]


def test_the_lead_of_a_summary_is_the_first_sentence_whatever_the_reference(summaries):
    test = [example(0, "summarize: Noise about it. The key is here!", "<unk>")]
    assert answers(summaries, test, test) == {"lead": ["Noise about it."]}
    short = [example(1, "summarize: only one sentence", "one")]
    assert answers(summaries, short, short) == {"lead": ["only one sentence"]}


def test_other_tasks_no_training_examples_and_huge_ones_have_no_baselines(
    task, summaries, monkeypatch
):
    examples = task.examples("train")
    other = dataclasses.replace(task, choices=len)
    assert not has_baselines(other)
    assert answers(other, examples, examples) == {}
    assert answers(summaries, [], examples) == {}

    size = sum(len(example.inputs) for example in examples)
    monkeypatch.setattr(classifiers, "MAX_CHARACTERS", size - 1)
    assert answers(task, examples, examples) == {}
