"""Logistic regression on word vectors: the fair baseline for pre-training on the same text."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from eval.task import Example

STRENGTHS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Values of C that are tried: the inverse of how strongly weights are held to zero."""

WORD_SHARES = (0.25, 0.5)
"""Shares that are tried of a classifier by counts of words, in the logarithms of probabilities."""

_MOST_CHOOSING = 5_000  # training examples while settings are chosen
_HELD_OUT = 5  # every fifth example chooses, where there is no dev split
_MOST_ITERATIONS = 300


class TextVectors(Protocol):
    """Anything that gives texts vectors: words of a corpus, or a frozen encoder."""

    @property
    def source(self) -> str:
        """Description of what the vectors were made of."""
        ...

    def mean(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Returns <float32>[N, D] means over the parts of N texts."""
        ...

    def max(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Returns <float32>[N, D] the largest values over the parts of N texts."""
        ...


class Setting(NamedTuple):
    """Features and regularization strength of a classifier.

    Attributes:
        strength: C of the regression on vectors.
        has_max: Whether the features include the maxima next to the means.
        word_share: Share of the regression on counts of words.
    """

    strength: float
    has_max: bool = False
    word_share: float = 0.0

    def __str__(self) -> str:
        """Returns a description of the setting."""
        features = "the mean and maximum" if self.has_max else "the mean"
        text = f"logistic regression on {features} of a text's words, C {self.strength:g}"
        if self.word_share:
            text += f", {100 * self.word_share:.0f} % of that on counts of words"
        return text


class VectorAnswers(NamedTuple):
    """The answers of the classifier.

    Attributes:
        outputs: N answers.
        features: Description of its features and of how they were chosen.
    """

    outputs: list[str]
    features: str


def classify_by_vectors(
    vectors: TextVectors,
    train: Sequence[Example],
    dev: Sequence[Example],
    test: Sequence[Example],
    word_shares: Sequence[float] = WORD_SHARES,
) -> VectorAnswers:
    """Returns the answers to `test` of a logistic regression with the setting that is best on `dev`.

    Args:
        vectors: Vectors of words, or of another kind.
        train: Examples with their targets, at least one.
        dev: Examples for choosing settings; if empty, every fifth example of `train`, and the final
            fit uses all of `train`.
        test: N examples to answer.
        word_shares: Shares that are tried of a classifier by counts of words; () for none.
    """
    # Examples for fitting and for choosing.
    fitting = list(train)
    chosen_on = f"{len(dev):,} dev examples"
    if not dev:
        dev = train[::_HELD_OUT]
        fitting = [example for number, example in enumerate(train) if number % _HELD_OUT]
        chosen_on = f"{len(dev):,} of the training examples"

    # A single class needs no fit.
    if len({example.targets for example in fitting}) < 2:
        counts = Counter(example.targets for example in train)
        answer, _ = counts.most_common(1)[0]
        features = f"nothing of {vectors.source}, since there is one class"
        return VectorAnswers([answer] * len(test), features)

    # Large training sets are subsampled while settings are chosen.
    thinned = fitting[:: -(-len(fitting) // _MOST_CHOOSING)]
    setting = _choose(_Classifiers(vectors, thinned, dev), word_shares)
    outputs = _Classifiers(vectors, train, test).answers(setting)
    return VectorAnswers(outputs, f"{vectors.source}: {setting}, chosen on {chosen_on}")


FeatureFunction = Callable[[Sequence[str]], NDArray[np.float32]]
"""Returns <float32>[N, D] of N texts."""


class _Features(NamedTuple):
    """<float32>[N, D] features of the training texts and of the evaluated texts."""

    train: NDArray[np.float32]
    test: NDArray[np.float32]


class _Classifiers:
    """Classifiers that are fitted to training examples and applied to others."""

    def __init__(
        self, vectors: TextVectors, train: Sequence[Example], test: Sequence[Example]
    ) -> None:
        self._inputs = [example.inputs for example in train]
        self._targets = [example.targets for example in train]
        self._test_inputs = [example.inputs for example in test]
        self._test_targets = [example.targets for example in test]
        self._classes = sorted(set(self._targets))

        # Each is fitted once, no matter how often it is used.
        self._vectors = vectors
        self._features = lru_cache(self._standardized)
        self._by_vectors = lru_cache(self._fit_to_vectors)
        self._by_words = lru_cache(self._fit_to_words)

    def answers(self, setting: Setting) -> list[str]:
        """Returns the answers with a setting."""
        scores = self._by_vectors(setting.strength, setting.has_max)  # [N, classes]
        if setting.word_share:
            share = setting.word_share
            scores = (1 - share) * scores + share * self._by_words()
        return [self._classes[number] for number in scores.argmax(axis=1)]

    def num_right(self, setting: Setting) -> int:
        """Returns how many answers are right."""
        pairs = zip(self.answers(setting), self._test_targets, strict=True)
        return sum(answer == target for answer, target in pairs)

    def _fit_to_vectors(self, strength: float, has_max: bool) -> NDArray[np.float64]:
        """Returns <float64>[N, classes] logarithms of probabilities from word vectors."""
        features = [self._features(self._vectors.mean)]
        if has_max:
            features.append(self._features(self._vectors.max))

        # Features side by side.
        train = np.hstack([part.train for part in features])
        test = np.hstack([part.test for part in features])
        return self._fit(train, test, strength)

    def _standardized(self, features_of: FeatureFunction) -> _Features:
        """Returns features of all texts, around 0 in units of their spread over the training texts."""
        train = features_of(self._inputs)
        centre = train.mean(axis=0)
        spread = max(float((train - centre).std()), 1e-9)
        test = features_of(self._test_inputs)
        return _Features((train - centre) / spread, (test - centre) / spread)

    def _fit_to_words(self) -> NDArray[np.float64]:
        """Returns <float64>[N, classes] logarithms of probabilities from word counts."""
        from sklearn.feature_extraction.text import CountVectorizer

        vectorizer = CountVectorizer(token_pattern=r"\w+")
        if not any(map(vectorizer.build_analyzer(), self._inputs)):
            return np.zeros((len(self._test_inputs), len(self._classes)))
        counts = vectorizer.fit_transform(self._inputs)
        return self._fit(counts, vectorizer.transform(self._test_inputs), strength=1.0)

    def _fit(self, train: Any, test: Any, strength: float) -> NDArray[np.float64]:
        from sklearn.linear_model import LogisticRegression

        classifier = LogisticRegression(C=strength, max_iter=_MOST_ITERATIONS)
        classifier.fit(train, self._targets)
        return classifier.predict_log_proba(test)


def _choose(classifiers: _Classifiers, word_shares: Sequence[float] = WORD_SHARES) -> Setting:
    """Returns the setting with the most right answers; ties go to the first, which is the simplest."""
    # Strength of the regularization of the means' weights.
    num_right: Counter[Setting] = Counter()
    for strength in STRENGTHS:
        setting = Setting(strength)
        num_right[setting] = classifiers.num_right(setting)

    # More features, at the best strength of fewer and at the next stronger one.
    best = _best(num_right)
    place = STRENGTHS.index(best.strength)
    for strength in STRENGTHS[max(place - 1, 0) : place + 1]:
        setting = Setting(strength, has_max=True)
        num_right[setting] = classifiers.num_right(setting)

    # Words in addition to the vectors.
    best = _best(num_right)
    for word_share in word_shares:
        setting = best._replace(word_share=word_share)
        num_right[setting] = classifiers.num_right(setting)
    return _best(num_right)


def _best(num_right: Counter[Setting]) -> Setting:
    return num_right.most_common(1)[0][0]
