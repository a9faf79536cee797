"""Baselines for classification and summarization, without a neural network."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stmoe_eval.baselines.texts import answer_texts
from stmoe_eval.task import Example, Task

if TYPE_CHECKING:
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.pipeline import Pipeline

MAX_CHARACTERS = 10_000_000
"""Of training inputs: fitting takes about 10 seconds then. What has more are sets of the hub of 25,000 rows or more."""

_PROMPT = "summarize: "
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_MAX_COMPARED = 1000


class BaselineData(NamedTuple):
    """Training data of the baselines.

    Attributes:
        train: Examples with their targets.
        fitted_to: Description of `train`.
    """

    train: Sequence[Example]
    fitted_to: str = "all training examples"


def has_baselines(task: Task) -> bool:
    """Returns whether a task has baselines: all do unless each example brings its own choices."""
    return not callable(task.choices)


def baseline_outputs(
    task: Task, data: BaselineData, test: Sequence[Example]
) -> dict[str, list[str]]:
    """Returns the answers of baselines to `test`, by name.

    A classification has `majority` (the most frequent target), `naive Bayes` and `logistic
    regression` on counts of words. A summarization has `majority` (the most frequent summary; of
    equals the one with the highest mean ROUGE-1 against the others), `lead` (the first sentence),
    and the two classifiers as pickers of a sentence. Other texts have those of `answer_texts`.

    Args:
        task: The task.
        data: Training data.
        test: N examples to answer.

    Returns:
        N answers by baseline; no baselines for tasks of other kinds, without training examples, or
        with more than MAX_CHARACTERS characters of them.
    """
    num_characters = sum(len(example.inputs) for example in data.train)
    if not data.train or num_characters > MAX_CHARACTERS:
        return {}

    if task.is_classification:
        return _classify(data.train, test)
    if _is_summarization(task):
        return _summarize(data.train, test)
    if callable(task.choices):
        return {}
    return answer_texts(data.train, [example.inputs for example in test])


def _is_summarization(task: Task) -> bool:
    return task.metrics[0].name.lower().startswith("rouge")


def _classifiers() -> "dict[str, Pipeline]":
    """Returns two classifiers of texts by name, on counts of words, not fitted."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.naive_bayes import MultinomialNB
    from sklearn.pipeline import make_pipeline

    return {
        "naive Bayes": make_pipeline(CountVectorizer(), MultinomialNB()),
        "logistic regression": make_pipeline(CountVectorizer(), LogisticRegression(max_iter=1000)),
    }


def _classify(train: Sequence[Example], test: Sequence[Example]) -> dict[str, list[str]]:
    """Returns the baselines of a classification."""
    from sklearn.feature_extraction.text import CountVectorizer

    inputs = [example.inputs for example in train]
    targets = [example.targets for example in train]
    test_inputs = [example.inputs for example in test]

    # The same answer for all: any model must beat it.
    majority, _ = Counter(targets).most_common(1)[0]
    same = [majority] * len(test)
    outputs = {"majority": same}

    # How much the words alone predict, without their order. Without words, or with one class, there
    # is nothing to fit.
    split_words = CountVectorizer().build_analyzer()
    can_fit = len(set(targets)) > 1 and any(map(split_words, inputs))
    for name, classifier in _classifiers().items():
        outputs[name] = same
        if can_fit:
            outputs[name] = list(classifier.fit(inputs, targets).predict(test_inputs))
    return outputs


# ---------------------------------------------------------------------------
# Summaries


def _summarize(train: Sequence[Example], test: Sequence[Example]) -> dict[str, list[str]]:
    """Returns the baselines of a summarization.

    The two pickers use the words of a sentence and, as an additional word, its position. They learn
    which sentence of a text has the highest ROUGE-1 against the summary, from texts of several
    sentences; they answer the most probable one.
    """
    texts = [_sentences(example) for example in test]
    typical = _most_typical([example.targets for example in train])
    outputs = {"majority": [typical] * len(test), "lead": [sentences[0] for sentences in texts]}

    # A training example for each sentence: whether it is the best one of its text.
    features: list[str] = []
    is_best: list[bool] = []
    for example in train:
        sentences = _sentences(example)
        if len(sentences) > 1:
            labels = [False] * len(sentences)
            labels[_best_sentence(sentences, example.targets)] = True
            features += _with_position(sentences)
            is_best += labels
    if not features:
        return outputs

    # The answer is the most probable best sentence.
    for name, classifier in _classifiers().items():
        classifier.fit(features, is_best)
        picked = []
        for sentences in texts:
            probability = classifier.predict_proba(_with_position(sentences))[:, 1]
            picked.append(sentences[int(probability.argmax())])
        outputs[name] = picked
    return outputs


def _sentences(example: Example) -> list[str]:
    return _SENTENCE_END.split(example.inputs.removeprefix(_PROMPT).strip())


def _with_position(sentences: Sequence[str]) -> list[str]:
    return [f"{sentence} place{number}" for number, sentence in enumerate(sentences)]


def _best_sentence(sentences: Sequence[str], summary: str) -> int:
    """Returns the number of the sentence with the highest ROUGE-1, the first of several."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rouge1"])
    scores = [scorer.score(summary, sentence)["rouge1"].fmeasure for sentence in sentences]
    return int(np.argmax(scores))


def _most_typical(summaries: Sequence[str]) -> str:
    """Returns the most frequent summary; among several, the one most similar to all summaries.

    If there are many, both the candidates and the examples that they are compared with are evenly
    spaced samples.
    """
    from sklearn.feature_extraction.text import CountVectorizer

    counts = Counter(summaries)
    largest = max(counts.values())

    # Summaries mostly differ, so that nearly all are candidates.
    candidates = _sample([summary for summary, count in counts.items() if count == largest])
    others = _sample(summaries)

    vectorizer = CountVectorizer(binary=True, token_pattern=r"[A-Za-z0-9]+")
    vectorizer.fit([*candidates, *others])
    candidate_words = _word_sets(vectorizer, candidates)
    other_words = _word_sets(vectorizer, others)

    # Each candidate against all others, by words as sets.
    mean_rouge = _rouge1(candidate_words, other_words).mean(axis=1)  # [N]
    return candidates[int(mean_rouge.argmax())]


def _word_sets(vectorizer: "CountVectorizer", texts: Sequence[str]) -> NDArray[np.float32]:
    """Returns <float32>[N, V] 1 where a text has a word."""
    return vectorizer.transform(texts).toarray().astype(np.float32)


def _rouge1(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns ROUGE-1 of texts as sets of words.

    Args:
        a: <float32>[N, V] N sets.
        b: <float32>[M, V] M sets.

    Returns:
        <float32>[N, M] F-measure of each of `a` against each of `b`.
    """
    num_shared = a @ b.T
    num_words = a.sum(1)[:, None] + b.sum(1)[None]
    return 2 * num_shared / np.maximum(num_words, 1)


def _sample(texts: Sequence[str]) -> list[str]:
    """Returns at most _MAX_COMPARED texts, evenly spaced."""
    step = math.ceil(len(texts) / _MAX_COMPARED)
    return list(texts[::step])
