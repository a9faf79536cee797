"""Logistic regression on vectors of words: the honest rival of pre-training, which sees the same text."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from eval.task import Example
from eval.word_vectors import WordVectors

STRENGTHS = (0.003, 0.01, 0.03, 0.1, 0.3)
"""Values of C that are tried: the inverse of how strongly weights are held to zero."""

_MOST_CHOOSING = 5_000  # training examples while settings are chosen
_HELD_OUT = 5  # every fifth example chooses, where there is no dev split


class Setting(NamedTuple):
    """What a classifier sees of a text, and how strongly it is regularised.

    Attributes:
        strength: C of the regression, for the vectors.
        has_max: Whether it sees the largest values beside the means.
        has_words: Whether it sees counts of words, too.
    """

    strength: float
    has_max: bool = False
    has_words: bool = False

    @property
    def name(self) -> str:
        """What it sees, in words."""
        vectors = "the mean and maximum" if self.has_max else "the mean"
        words = " with word counts" if self.has_words else ""
        return f"{vectors} of word vectors{words}, C {self.strength:g}"


class VectorAnswers(NamedTuple):
    """The answers of the classifier.

    Attributes:
        outputs: N answers.
        features: What it has seen beside the labels, and by what that was chosen, in words.
    """

    outputs: list[str]
    features: str


def classify_by_vectors(
    vectors: WordVectors,
    train: Sequence[Example],
    dev: Sequence[Example],
    test: Sequence[Example],
) -> VectorAnswers:
    """Returns the answers to `test` of a logistic regression with the setting that is best on `dev`.

    Args:
        vectors: Vectors of words.
        train: Examples with their targets, at least one.
        dev: Examples that choose; none for every fifth of `train`, which is then fitted to all.
        test: N examples to answer.
    """
    targets = [example.targets for example in train]
    if len(set(targets)) == 1:
        features = f"{vectors.source}, of which one class needs nothing"
        return VectorAnswers(targets[:1] * len(test), features)

    # What fits and what chooses; a large training set is thinned out while it is chosen.
    chosen_on = f"{len(dev):,} dev examples"
    fitting = list(train)
    if not dev:
        dev = train[::_HELD_OUT]
        fitting = [example for number, example in enumerate(train) if number % _HELD_OUT]
        chosen_on = f"{len(dev):,} of the training examples"
    fitting = fitting[:: -(-len(fitting) // _MOST_CHOOSING)] or list(train)

    setting = _choose(_Texts(vectors, fitting, dev))
    outputs = _Texts(vectors, train, test).answers(setting)
    features = f"{vectors.source}: {setting.name}, chosen on {chosen_on}"
    return VectorAnswers(outputs, features)


class _Texts:
    """Features of texts to fit a classifier to and of texts to answer, each counted once."""

    def __init__(
        self, vectors: WordVectors, train: Sequence[Example], test: Sequence[Example]
    ) -> None:
        inputs = [example.inputs for example in train]
        test_inputs = [example.inputs for example in test]
        self.targets = [example.targets for example in train]
        self.test_targets = [example.targets for example in test]

        self._means = _scaled(vectors.mean(inputs), vectors.mean(test_inputs))
        self._maxima = _scaled(vectors.max(inputs), vectors.max(test_inputs))
        self._words = _count_words(inputs, test_inputs)

    def answers(self, setting: Setting) -> list[str]:
        """Returns the answers of a classifier with a setting."""
        if len(set(self.targets)) == 1:
            return self.targets[:1] * len(self.test_targets)

        # C is that of the vectors; counts of words keep the penalty that they have alone.
        parts = [self._means]
        if setting.has_max:
            parts.append(self._maxima)
        if setting.has_words:
            scale = setting.strength**-0.5
            parts.append(tuple(counts * scale for counts in self._words))
        train_parts, test_parts = zip(*parts, strict=True)

        classifier = LogisticRegression(C=setting.strength, max_iter=300)
        classifier.fit(_side_by_side(train_parts), self.targets)
        return list(classifier.predict(_side_by_side(test_parts)))

    def num_right(self, setting: Setting) -> int:
        """Returns how many answers are right."""
        pairs = zip(self.answers(setting), self.test_targets, strict=True)
        return sum(answer == target for answer, target in pairs)


def _choose(texts: _Texts) -> Setting:
    """Returns the setting with the most right answers; of equals the simplest."""
    num_right: Counter[Setting] = Counter()
    for strength in STRENGTHS:
        setting = Setting(strength)
        num_right[setting] = texts.num_right(setting)

    # More features, each at the best strength of fewer and at the next stronger one.
    for change in ({"has_max": True}, {"has_words": True}):
        best = num_right.most_common(1)[0][0]
        place = STRENGTHS.index(best.strength)
        for strength in STRENGTHS[max(place - 1, 0) : place + 1]:
            setting = best._replace(strength=strength, **change)
            num_right[setting] = texts.num_right(setting)
    return num_right.most_common(1)[0][0]


def _scaled(train: Any, test: Any) -> tuple[Any, Any]:
    """Returns features around 0, in units of their spread over the training texts."""
    centre = train.mean(axis=0)
    spread = max(float((train - centre).std()), 1e-9)
    return (train - centre) / spread, (test - centre) / spread


def _count_words(train: Sequence[str], test: Sequence[str]) -> tuple[Any, Any]:
    """Returns counts of the words of training texts, in both."""
    vectorizer = CountVectorizer(token_pattern=r"\w+")
    try:
        counts = vectorizer.fit_transform(train)
    except ValueError:  # no text has a word
        empty = np.zeros((len(train), 1)), np.zeros((len(test), 1))
        return empty
    return counts, vectorizer.transform(test)


def _side_by_side(parts: Sequence[Any]) -> Any:
    """Returns features beside each other: dense ones, or sparse where one is."""
    if any(map(sparse.issparse, parts)):
        return sparse.hstack(parts, format="csr")
    return np.hstack(parts)
