"""Logistic regression on word vectors. Oracle: words whose class only unlabelled text tells."""

import pytest

from eval.baselines import vector_classifier
from eval.baselines.classifiers import BaselineData, baseline_outputs
from eval.baselines.vector_classifier import STRENGTHS, Setting, classify_by_vectors
from eval.baselines.word_vectors import build_word_vectors
from eval.task import Example
from tests.eval.test_word_vectors import ANIMALS, METALS, sentences


@pytest.fixture(scope="module")
def vectors():
    return build_word_vectors(sentences(), "the sentences")


def examples(words, targets) -> list[Example]:
    pairs = enumerate(zip(words, targets, strict=True))
    return [
        Example(str(n), str(n), f"What is {word}?", target, (), {}) for n, (word, target) in pairs
    ]


def labelled(start: int, end: int, repeat: int = 1) -> list[Example]:
    """Some animals and as many metals with their classes."""
    animals, metals = ANIMALS[start:end] * repeat, METALS[start:end] * repeat
    targets = ["animal"] * len(animals) + ["metal"] * len(metals)
    return examples([*animals, *metals], targets)


def test_words_without_a_label_get_the_class_of_words_that_are_used_alike(task, vectors):
    train, dev, test = labelled(0, 2, repeat=5), labelled(2, 3), labelled(3, 5)
    data = BaselineData(train, dev, "20 of 20", vectors)
    made = baseline_outputs(task, data, test)
    assert list(made) == ["majority", "naive Bayes", "logistic regression", "word vectors"]
    right = [example.targets for example in test]
    assert made["word vectors"].outputs == right
    assert made["logistic regression"].outputs != right
    fitted_to = made["word vectors"].fitted_to
    assert fitted_to.startswith(
        "20 of 20 and the sentences: logistic regression on the mean of a text's words, C "
    )
    assert fitted_to.endswith("chosen on 2 dev examples")


def test_the_setting_is_the_best_on_dev_and_of_equals_the_simplest(vectors):
    tried = []

    class Classifiers:
        def num_right(self, setting):
            tried.append(setting)
            points = {Setting(0.01): 5, Setting(0.03): 5, Setting(0.003, has_max=True): 6}
            points[Setting(0.003, has_max=True, word_share=0.25)] = 6
            points[Setting(0.003, has_max=True, word_share=0.5)] = 7
            return points.get(setting, 1)

    best = vector_classifier._choose(Classifiers())
    assert best == Setting(0.003, has_max=True, word_share=0.5)
    assert [setting.strength for setting in tried[: len(STRENGTHS)]] == list(STRENGTHS)
    assert tried[len(STRENGTHS) : -2] == [Setting(0.003, True), Setting(0.01, True)]
    assert str(best) == (
        "logistic regression on the mean and maximum of a text's words, C 0.003, "
        "50 % of that on counts of words"
    )


def test_without_dev_examples_a_part_of_the_training_examples_chooses(vectors):
    train, test = labelled(0, 2, repeat=5), labelled(3, 5)
    answers = classify_by_vectors(vectors, train, [], test)
    assert answers.outputs == [example.targets for example in test]
    assert answers.features.endswith("chosen on 4 of the training examples")

    # The labels of what is answered change nothing.
    blind = [example._replace(targets="<unk>") for example in test]
    assert classify_by_vectors(vectors, train, [], blind) == answers


@pytest.mark.parametrize("words", [("dog",), ("unheard", "of")])
def test_few_labels_one_class_and_unknown_words_are_answered(vectors, words, task):
    train = examples(words, ["animal"] * len(words))
    for dev in ([], labelled(2, 3)):
        made = baseline_outputs(task, BaselineData(train, dev, "few", vectors), labelled(3, 5))
        assert len(made) == 4
        assert all(set(baseline.outputs) == {"animal"} for baseline in made.values())


@pytest.mark.parametrize("words", [("unheard", "of"), ("?", "!")])
def test_words_that_no_vector_knows_leave_the_classes_open(vectors, words, task):
    train = examples(words, ["animal", "metal"])
    train = [example._replace(inputs=example.inputs.split()[-1][:-1]) for example in train]
    data = BaselineData(train, labelled(2, 3), "few", vectors)
    for baseline in baseline_outputs(task, data, labelled(3, 5)).values():
        assert set(baseline.outputs) <= {"animal", "metal"}
        assert len(baseline.outputs) == 4
