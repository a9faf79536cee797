"""Baselines on data that words separate, so that the answers are known beforehand."""

import dataclasses

import pytest

from eval.baselines import classifiers
from eval.baselines.classifiers import BaselineData, baseline_outputs, has_baselines
from eval.scores.metrics import ACCURACY, ROUGE1
from eval.task import TASKS, Example


def example(number, inputs, targets):
    return Example(str(number), str(number), inputs, targets, (), {})


def answers(task, train, test):
    """The answers of each baseline without vectors."""
    made = baseline_outputs(task, BaselineData(train), test)
    return {name: baseline.outputs for name, baseline in made.items()}


@pytest.fixture
def summaries(task):
    return dataclasses.replace(task, choices=(), metrics=(ROUGE1,))


@pytest.fixture
def bodies():
    """The best sentence has the word "key", and stands second or third."""
    made = []
    for i in range(13):
        sentences = [
            f"Noise about thing{i} is first.",
            f"The key is word{i}.",
            f"More noise of thing{i}!",
        ]
        if i % 2:
            sentences[1:] = sentences[:0:-1]
        made.append(example(i, "summarize: " + " ".join(sentences), f"the key: word{i}"))
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
    assert outputs["lead"] == [f"Noise about thing{i} is first." for i in range(9, 13)]
    for name in ("naive Bayes", "logistic regression"):
        assert outputs[name] == [f"The key is word{i}." for i in range(9, 13)]


def test_sentence_pickers_learn_a_place_where_words_say_nothing(summaries):
    def text(i):
        return f"summarize: a{i} b{i} c{i}. d{i} e{i} f{i}. g{i} h{i} k{i}."

    train = [example(i, text(i), f"g{i} h{i} k{i}.") for i in range(7)]
    outputs = answers(summaries, train, [example(0, text(99), "")])
    for name in ("naive Bayes", "logistic regression"):
        assert outputs[name] == ["g99 h99 k99."]


def test_answers_do_not_depend_on_the_references_of_the_test_split(summaries, bodies):
    blind = [example._replace(targets="<unk>", fields={}) for example in bodies]
    assert answers(summaries, bodies, blind) == answers(summaries, bodies, bodies)


def test_the_majority_summary_is_the_most_frequent_and_of_equals_that_most_like_the_others(
    summaries,
):
    twice = [
        example(i, "summarize: a body.", t)
        for i, t in enumerate(["rare one", "the key", "the key", "the lock"])
    ]
    assert answers(summaries, twice, twice[:1])["majority"] == ["the key"]
    once = [
        example(i, "summarize: a body.", t)
        for i, t in enumerate(["far off", "the red key", "the red", "the lock"])
    ]
    assert answers(summaries, once, once[:2])["majority"] == ["the red"] * 2


def test_bodies_of_one_sentence_leave_nothing_to_pick(summaries):
    train = [example(i, f"summarize: only sentence {i}", "one") for i in range(3)]
    assert list(answers(summaries, train, train)) == ["majority", "lead"]


def test_other_tasks_no_training_examples_and_huge_ones_have_no_baselines(
    task, summaries, bodies, monkeypatch
):
    for other in (
        dataclasses.replace(task, choices=(), metrics=(ACCURACY,)),
        dataclasses.replace(task, choices=len),
    ):
        assert not has_baselines(other)
        assert answers(other, bodies, bodies) == {}
    assert answers(summaries, [], bodies) == {}
    monkeypatch.setattr(
        classifiers, "MAX_CHARACTERS", sum(len(example.inputs) for example in bodies) - 1
    )
    assert answers(summaries, bodies, bodies) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unicode_category", "docstring_summary"])
def test_the_offline_tasks_have_baselines_that_score_above_the_majority(name):
    task = TASKS.get(name)
    assert has_baselines(task)
    examples = task.examples("test")
    outputs = answers(task, task.examples("train"), examples)
    scores = {
        name: task.metrics[0].score(*task.values(examples, made)) for name, made in outputs.items()
    }
    assert scores.pop("majority") < max(scores.values())
    assert all(0 < score < 100 for score in scores.values())
