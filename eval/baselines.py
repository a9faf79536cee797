"""What needs no neural network: the lines that a fine-tuned model has to stand beside."""

from collections import Counter
from collections.abc import Sequence

from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import make_pipeline

from eval.task import Example


def baseline_outputs(train: Sequence[Example], test: Sequence[Example]) -> dict[str, list[str]]:
    """Returns the answers of three baselines to `test`, fitted to `train`.

    Returns:
        `majority` (the most frequent target), `naive Bayes` and `logistic regression` on counts of words.
    """
    inputs, targets = [example.inputs for example in train], [example.targets for example in train]
    questions = [example.inputs for example in test]
    majority = Counter(targets).most_common(1)[0][0]
    outputs = {"majority": [majority] * len(test)}
    for name, classifier in (
        ("naive Bayes", MultinomialNB()),
        ("logistic regression", LogisticRegression(max_iter=1000)),
    ):
        outputs[name] = list(make_pipeline(CountVectorizer(), classifier).fit(inputs, targets).predict(questions))
    return outputs
