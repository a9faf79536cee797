"""Baselines of free text: what copying gets, without learning anything.

Many inputs are a prefix and a text, e.g. `translate English to German: ...`, or the language of a
name: `el: Greece`.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from moe.data.pair_files import Pair
from stmoe_eval.task import Example

_ROWS = 256  # inputs that are compared with all training examples at a time
_LETTERS = (1, 4)  # lengths of the runs of letters that are compared


def answer_texts(train: Sequence[Example | Pair], inputs: Sequence[str]) -> dict[str, list[str]]:
    """Returns the answers to `inputs`, by the name of the baseline.

    `copy` answers the text after the prefix; `most similar` the target of the training text that is
    most similar in its letters (TF-IDF), of those with the same prefix if there are any; `nearest
    prefix`, for names the nearest language, the target of the same text after another prefix. Of
    the prefixes that have the text, it takes the one whose targets are most often equal to those of
    the input's prefix; without one, it answers the text. It exists where texts are trained after
    several prefixes.

    Args:
        train: Examples with their targets, at least one.
        inputs: N inputs to answer.
    """
    targets: dict[tuple[str, str], str] = {}
    for example in train:
        targets.setdefault(_split_prefix(example.inputs), example.targets)
    questions = [_split_prefix(text) for text in inputs]

    answers = {
        "copy": [text for _, text in questions],
        "most similar": _similar(targets, questions),
    }
    by_prefix = _nearest_prefix(targets, questions)
    return answers if by_prefix is None else {**answers, "nearest prefix": by_prefix}


def _split_prefix(text: str) -> tuple[str, str]:
    """Returns what comes before the first colon and space, and the rest; no prefix without both."""
    prefix, _, rest = text.partition(": ")
    return (prefix, rest) if rest else ("", text)


def _similar(
    targets: dict[tuple[str, str], str], questions: Sequence[tuple[str, str]]
) -> list[str]:
    """Returns the target of the most similar text for each question; the first of equals."""
    from scipy import sparse
    from sklearn.feature_extraction.text import TfidfVectorizer

    # A text has one vector, with however many prefixes it occurs.
    texts = list(dict.fromkeys(text for _, text in [*targets, *questions]))
    row_of = {text: row for row, text in enumerate(texts)}
    letters = TfidfVectorizer(analyzer="char", ngram_range=_LETTERS)
    vectors = sparse.csr_matrix(letters.fit_transform(texts))  # [T, V]

    trained_with: dict[str, list[tuple[str, str]]] = {}
    for key in targets:
        trained_with.setdefault(key[0], []).append(key)
    asked_with: dict[str, list[int]] = {}
    for number, (prefix, _) in enumerate(questions):
        asked_with.setdefault(prefix, []).append(number)

    answers = [""] * len(questions)
    for prefix, numbers in asked_with.items():
        candidates = trained_with.get(prefix) or list(targets)
        trained = vectors[[row_of[text] for _, text in candidates]].T
        for start in range(0, len(numbers), _ROWS):
            block = numbers[start : start + _ROWS]
            asked = vectors[[row_of[questions[number][1]] for number in block]]
            best = (asked @ trained).toarray().argmax(axis=1)
            for number, candidate in zip(block, best, strict=True):
                answers[number] = targets[candidates[candidate]]
    return answers


def _nearest_prefix(
    targets: dict[tuple[str, str], str], questions: Sequence[tuple[str, str]]
) -> list[str] | None:
    """Returns the target of each question's text with the nearest prefix; None without several."""
    prefixes_of: dict[str, list[str]] = {}
    for prefix, text in targets:
        prefixes_of.setdefault(text, []).append(prefix)

    # Only prefixes with a text in common are compared: each title of a text may be a prefix.
    shared = {text: prefixes for text, prefixes in prefixes_of.items() if len(prefixes) > 1}
    if not shared:
        return None
    compared = dict.fromkeys(chain.from_iterable(shared.values()))
    numbers = {prefix: number for number, prefix in enumerate(compared)}
    equality = _equality(targets, shared, numbers)

    answers = []
    for prefix, text in questions:
        others = [other for other in prefixes_of.get(text, ()) if other != prefix]
        if not others:
            answers.append(text)
            continue
        nearest = 0
        if prefix in numbers:
            rows = [numbers[other] for other in others]
            nearest = int(equality[numbers[prefix], rows].argmax())
        answers.append(targets[others[nearest], text])
    return answers


def _equality(
    targets: dict[tuple[str, str], str], prefixes_of: dict[str, list[str]], numbers: dict[str, int]
) -> NDArray[np.float64]:
    """Returns <float64>[P, P] the share of equal targets among the texts that two prefixes share."""
    num_shared = np.zeros((len(numbers), len(numbers)))
    num_equal = np.zeros_like(num_shared)
    for text, prefixes in prefixes_of.items():
        rows = [numbers[prefix] for prefix in prefixes]
        written = np.array([targets[prefix, text] for prefix in prefixes])
        num_shared[np.ix_(rows, rows)] += 1
        num_equal[np.ix_(rows, rows)] += written[:, None] == written
    return num_equal / np.maximum(num_shared, 1)
