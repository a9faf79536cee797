"""What needs no neural network: the lines that a fine-tuned model has to stand beside."""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rouge_score.rouge_scorer import RougeScorer
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import Pipeline, make_pipeline

from eval.task import Example, Task

MOST_CHARACTERS = 10_000_000
"""Of training inputs: fitting takes about 10 seconds then. What has more are sets of the hub of 25,000 rows or more."""

_PROMPT = "summarize: "
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_MOST_COMPARED = 1000


def has_baselines(task: Task) -> bool:
    """Returns whether `baseline_outputs` knows what to do with a task: the same choices for all, or
    summaries.
    """
    return task.is_classification or _is_summarization(task)


def baseline_outputs(
    task: Task, train: Sequence[Example], test: Sequence[Example]
) -> dict[str, list[str]]:
    """Returns the answers of baselines to `test`, fitted to `train`, by name.

    A classification has `majority` (the most frequent target), `naive Bayes` and `logistic
    regression` on counts of words. A summarization has `majority` (the most frequent summary; of
    equals the one with the highest mean ROUGE-1 against the others), `lead` (the first sentence),
    and the two classifiers as pickers of a sentence.

    Returns:
        An answer for each of `test`, in their order; no baselines for tasks of other kinds, without
        training examples, or with more than MOST_CHARACTERS characters of them.
    """
    if not train or sum(len(example.inputs) for example in train) > MOST_CHARACTERS:
        return {}
    if task.is_classification:
        return _classify(train, test)
    return _summarize(train, test) if _is_summarization(task) else {}


def _is_summarization(task: Task) -> bool:
    """Returns whether the task's headline is ROUGE."""
    return task.metrics[0].name.lower().startswith("rouge")


def _classifiers() -> dict[str, Pipeline]:
    """Returns two classifiers of texts by name, on counts of words, not fitted."""
    models = {
        "naive Bayes": MultinomialNB(),
        "logistic regression": LogisticRegression(max_iter=1000),
    }
    return {name: make_pipeline(CountVectorizer(), model) for name, model in models.items()}


def _classify(train: Sequence[Example], test: Sequence[Example]) -> dict[str, list[str]]:
    """Returns the baselines of a classification."""
    inputs, targets = [example.inputs for example in train], [example.targets for example in train]
    outputs = {"majority": [Counter(targets).most_common(1)[0][0]] * len(test)}
    for name, classifier in _classifiers().items():
        outputs[name] = list(
            classifier.fit(inputs, targets).predict([example.inputs for example in test])
        )
    return outputs


def _summarize(train: Sequence[Example], test: Sequence[Example]) -> dict[str, list[str]]:
    """Returns the baselines of a summarization.

    The two pickers see the words of a sentence and, as one more word, its place. They learn which
    sentence of a text has the highest ROUGE-1 against the summary, from texts of several sentences;
    they answer the most probable one.
    """
    texts = [_sentences(example) for example in test]
    outputs = {
        "majority": [_most_typical([example.targets for example in train])] * len(test),
        "lead": [text[0] for text in texts],
    }
    features, is_best = [], []
    for example in train:
        sentences = _sentences(example)
        if len(sentences) > 1:
            features += _with_place(sentences)
            best = _most_like(sentences, example.targets)
            is_best += [number == best for number in range(len(sentences))]
    if not features:
        return outputs
    for name, classifier in _classifiers().items():
        classifier.fit(features, is_best)
        outputs[name] = [
            text[int(classifier.predict_proba(_with_place(text))[:, 1].argmax())] for text in texts
        ]
    return outputs


def _sentences(example: Example) -> list[str]:
    """Returns the sentences of a text; at least one."""
    return _SENTENCE_END.split(example.inputs.removeprefix(_PROMPT).strip())


def _with_place(sentences: Sequence[str]) -> list[str]:
    """Returns each sentence with a word for its place."""
    return [f"{sentence} place{number}" for number, sentence in enumerate(sentences)]


def _most_like(sentences: Sequence[str], summary: str) -> int:
    """Returns the number of the sentence with the highest ROUGE-1, the first of several."""
    scorer = RougeScorer(["rouge1"])
    return int(
        np.argmax([scorer.score(summary, sentence)["rouge1"].fmeasure for sentence in sentences])
    )


def _most_typical(summaries: Sequence[str]) -> str:
    """Returns the most frequent summary; of several, out of evenly taken ones, that which is most
    like the others.
    """
    counts = Counter(summaries)
    most = max(counts.values())
    frequent = [summary for summary, count in counts.items() if count == most]
    candidates, others = _thin_out(frequent), _thin_out(summaries)
    vectorizer = CountVectorizer(binary=True, token_pattern=r"[A-Za-z0-9]+").fit(
        [*candidates, *others]
    )
    ours, theirs = (
        vectorizer.transform(texts).toarray().astype(np.float32) for texts in (candidates, others)
    )
    return candidates[int(_f_measures(ours, theirs).mean(axis=1).argmax())]


def _f_measures(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns <float32>[N, M]: ROUGE-1 of N against M texts as sets of words, <float32>[N, V] and
    <float32>[M, V].
    """
    return 2 * ours @ theirs.T / np.maximum(ours.sum(1)[:, None] + theirs.sum(1)[None], 1)


def _thin_out(texts: Sequence[str]) -> list[str]:
    """Returns at most _MOST_COMPARED texts, evenly taken."""
    return list(texts[:: -(-len(texts) // _MOST_COMPARED)])
