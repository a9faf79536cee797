"""Baselines for questions with words to choose from."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from eval.task import Example

_ROWS = 256  # questions that are compared with all training examples at a time


ChoiceScores = list[dict[str, float]]
"""For each question, the score of each choice; the highest wins, and the first among equals."""


def choose_words(train: Sequence[Example], test: Sequence[Example]) -> dict[str, ChoiceScores]:
    """Returns the scores of the choices of each question, by the name of the baseline.

    `majority` takes the choice that is the most frequent training target, ties go to the first in
    the alphabet; `spelling` the one whose letters are most like those of the input; `nearest
    example` the one whose letters are most like the target of the training example with the most
    similar words (TF-IDF).

    Args:
        train: Examples with their targets, at least one.
        test: N questions to answer.
    """
    counts = Counter(example.targets for example in train)
    frequency: ChoiceScores = []
    for example in test:
        frequency.append({choice: float(counts[choice]) for choice in sorted(example.choices)})

    inputs = [example.inputs for example in test]
    return {
        "majority": frequency,
        "spelling": _most_like(inputs, test),
        "nearest example": _most_like(_nearest_targets(train, inputs), test),
    }


def best_choices(scores: ChoiceScores) -> list[str]:
    """Returns the choice with the highest score for each question; ties go to the first."""
    return [max(by_choice, key=lambda choice: by_choice[choice]) for by_choice in scores]


def _most_like(texts: Sequence[str], test: Sequence[Example]) -> ChoiceScores:
    """Returns the similarity of each choice's letters to those of its question."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    # Runs of two to four letters, weighted by rarity; each choice is compared with its question's
    # text.
    words: list[str] = []
    questions: list[int] = []
    for number, example in enumerate(test):
        words += example.choices
        questions += [number] * len(example.choices)
    letters = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4)).fit([*texts, *words])
    products = letters.transform(words).multiply(letters.transform(texts)[questions])
    similarity = np.asarray(products.sum(axis=1)).ravel()  # [all choices]

    scores = []
    start = 0
    for example in test:
        end = start + len(example.choices)
        values = map(float, similarity[start:end])
        scores.append(dict(zip(example.choices, values, strict=True)))
        start = end
    return scores


def _nearest_targets(train: Sequence[Example], inputs: Sequence[str]) -> list[str]:
    """Returns the target of the training example whose words are most similar to each input."""
    from scipy import sparse
    from sklearn.feature_extraction.text import TfidfVectorizer

    words = TfidfVectorizer(token_pattern=r"\w+")
    counted = words.fit_transform([example.inputs for example in train])
    train_rows = sparse.csr_matrix(counted)  # [M, V]
    rows = words.transform(inputs)  # [N, V]

    # Process some questions at a time: all questions times all examples would not fit into memory.
    targets = []
    for start in range(0, len(inputs), _ROWS):
        similarity = (rows[start : start + _ROWS] @ train_rows.T).toarray()
        targets += [train[number].targets for number in similarity.argmax(axis=1)]
    return targets
