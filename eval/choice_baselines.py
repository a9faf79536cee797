"""Baselines for questions with words to choose from: what can be had without knowing the answer."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import TfidfVectorizer

from eval.task import Example
from eval.word_vectors import WordVectors

_ROWS = 256  # questions that are compared with all training examples at a time


def choose_words(train: Sequence[Example], test: Sequence[Example]) -> dict[str, list[str]]:
    """Returns the choices of baselines for each question, by name.

    `majority` takes the choice that is the most frequent training target, of equals the first of
    the alphabet; `spelling` the one whose letters are most like those of the input; `nearest
    example` the one whose letters are most like the target of the training example with the most
    similar words (TF-IDF).

    Args:
        train: Examples with their targets, at least one.
        test: N questions to answer.
    """
    counts = Counter(example.targets for example in train)
    majority = []
    for example in test:
        ordered = sorted(example.choices)
        majority.append(max(ordered, key=lambda choice: counts[choice]))

    inputs = [example.inputs for example in test]
    return {
        "majority": majority,
        "spelling": _most_like(inputs, test),
        "nearest example": _most_like(_nearest_targets(train, inputs), test),
    }


def choose_by_vectors(vectors: WordVectors, test: Sequence[Example]) -> list[str]:
    """Returns the choice whose words are most like those of the input, by vectors of a text's words.

    The first of several; a choice that the text lacks is like nothing.
    """
    means = _unit(vectors.mean([example.inputs for example in test]))  # [N, D]
    answers = []
    for example, mean in zip(test, means, strict=True):
        similarity = _unit(vectors.mean(example.choices)) @ mean
        answers.append(example.choices[int(similarity.argmax())])
    return answers


def _most_like(texts: Sequence[str], test: Sequence[Example]) -> list[str]:
    """Returns the choice of each question whose letters are most like those of a text."""
    # Runs of two to four letters, rare ones weighing more; each choice beside its question's text.
    words: list[str] = []
    questions: list[int] = []
    for number, example in enumerate(test):
        words += example.choices
        questions += [number] * len(example.choices)
    letters = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4)).fit([*texts, *words])
    products = letters.transform(words).multiply(letters.transform(texts)[questions])
    similarity = np.asarray(products.sum(axis=1)).ravel()  # [all choices]

    answers = []
    start = 0
    for example in test:
        end = start + len(example.choices)
        answers.append(example.choices[int(similarity[start:end].argmax())])
        start = end
    return answers


def _nearest_targets(train: Sequence[Example], inputs: Sequence[str]) -> list[str]:
    """Returns the target of the training example whose words are most like those of each input."""
    words = TfidfVectorizer(token_pattern=r"\w+")
    train_rows = words.fit_transform([example.inputs for example in train])  # [M, V]
    rows = words.transform(inputs)  # [N, V]

    # Some questions at a time: all of them by all examples would fill the memory.
    targets = []
    for start in range(0, len(inputs), _ROWS):
        similarity = (rows[start : start + _ROWS] @ train_rows.T).toarray()
        targets += [train[number].targets for number in similarity.argmax(axis=1)]
    return targets


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns <float32>[N, D] vectors of length 1; zeros stay."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, 1e-9)
