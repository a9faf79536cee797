"""Baselines for classification and summarization, without a neural network."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from stmoe_eval.baselines.texts import answer_texts
from stmoe_eval.task import Example, Task

MAX_CHARACTERS = 10_000_000
"""Of training inputs: fitting takes about 10 seconds then. What has more are sets of the hub of 25,000 rows or more."""

_PROMPT = "summarize: "
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


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
    regression` on counts of words. A summarization has `lead` (the first sentence). Other texts have
    those of `answer_texts`.

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
    if task.metrics[0].name.lower().startswith("rouge"):
        texts = [example.inputs.removeprefix(_PROMPT).strip() for example in test]
        return {"lead": [_SENTENCE_END.split(text, maxsplit=1)[0] for text in texts]}
    return answer_texts(data.train, [example.inputs for example in test])


def _classify(train: Sequence[Example], test: Sequence[Example]) -> dict[str, list[str]]:
    """Returns the baselines of a classification."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.naive_bayes import MultinomialNB
    from sklearn.pipeline import make_pipeline

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
    classifiers = {
        "naive Bayes": MultinomialNB(),
        "logistic regression": LogisticRegression(max_iter=1000),
    }
    for name, classifier in classifiers.items():
        outputs[name] = same
        if can_fit:
            pipeline = make_pipeline(CountVectorizer(), classifier)
            outputs[name] = list(pipeline.fit(inputs, targets).predict(test_inputs))
    return outputs
