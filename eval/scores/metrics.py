"""Metrics in 0..100 of post-processed targets and answers.

Source of all of it: T5 `t5/evaluation/metrics.py` and `qa_utils.py`
(google-research/text-to-text-transfer-transformer at e081111) unless another is named. Values of
MultiRC and ReCoRD are mappings: `value`, and `group` in targets.
"""

import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.reports.published import SUPERGLUE
from eval.scores.additive import Additive, matthews, mean_f1
from moe import ConfigError, DataError

Values = Sequence[Any]
"""Post-processed targets or answers, one for each example, in the order of the examples."""

Each = Callable[[Values, Values], NDArray[np.float64]]


@dataclass(frozen=True)
class Metric:
    """A score of a whole split.

    Attributes:
        name: As in the report.
        score: (targets, answers) to a number in 0..100; correlations may be below 0.
        each: (targets, answers) to <float64>[N] scores whose mean over those that are not NaN is
            `score`: examples that do not count, as a repeated query, are NaN. None for a score that
            is no mean.
        additive: The same score of sums, for those that are no mean and have it.
    """

    name: str
    score: Callable[[Values, Values], float]
    each: Each | None = None
    additive: Additive | None = None


def mean_of(name: str, each: Each) -> Metric:
    """Returns the metric that is the mean of `each`; of no example that counts it is NaN."""

    def score(targets: Values, answers: Values) -> float:
        scores = each(targets, answers)
        counted = scores[~np.isnan(scores)]
        return float(counted.mean()) if counted.size else float("nan")

    return Metric(name, score, each)


def bare_values(values: Values) -> list[Any]:
    """Returns the `value` of each that is a mapping, and others as they are."""
    return [value["value"] if isinstance(value, Mapping) else value for value in values]


def exact_matches(targets: Values, answers: Values) -> NDArray[np.float64]:
    """Returns <float64>[N] 100 where an answer equals its target, 0 elsewhere."""
    return np.asarray(
        [100.0 * (target == answer) for target, answer in zip(targets, answers, strict=True)]
    )


ACCURACY = mean_of("accuracy", exact_matches)
SEQUENCE_ACCURACY = mean_of("sequence_accuracy", exact_matches)


def mean_multiclass_f1(num_classes: int) -> Metric:
    """Returns the mean F1 of the classes 0 .. num_classes - 1; that of a class that never occurs is
    0.
    """
    labels = range(num_classes)

    def score(targets: Values, answers: Values) -> float:
        return 100 * _f1(targets, answers, labels=labels, average="macro")

    return Metric(f"mean_{num_classes}class_f1", score, additive=mean_f1(labels))


def f1_score_with_invalid(targets: Values, answers: Values) -> float:
    """Returns the F1 of class 1; an answer other than 0 and 1 counts as the wrong one of them."""
    return 100 * _f1(targets, _without_invalid(targets, answers))


def _without_invalid(targets: Values, answers: Values) -> list[int]:
    """Returns answers 0 and 1 as they are, and in place of others the wrong one of the two."""
    pairs = zip(targets, answers, strict=True)
    return [answer if answer in (0, 1) else 1 - target for target, answer in pairs]


_F1 = mean_f1([1])
MACRO_F1 = mean_multiclass_f1(3)
F1_WITH_INVALID = Metric(
    "f1",
    f1_score_with_invalid,
    additive=_F1._replace(
        parts=lambda targets, answers: _F1.parts(targets, _without_invalid(targets, answers))
    ),
)
MULTIRC_F1A = Metric(
    "f1",
    lambda targets, answers: f1_score_with_invalid(bare_values(targets), bare_values(answers)),
    additive=_F1._replace(
        parts=lambda targets, answers: _F1.parts(
            bare_values(targets), _without_invalid(bare_values(targets), bare_values(answers))
        )
    ),
)


def _multirc_questions(targets: Values, answers: Values) -> NDArray[np.float64]:
    """Returns <float64>[N] 100 at the first answer of a question that is all right, 0 of others,
    NaN elsewhere.
    """
    right: dict[Any, bool] = {}
    matches = exact_matches(bare_values(targets), bare_values(answers)) == 100
    for group, match in zip(_groups(targets), matches, strict=True):
        right[group] = right.get(group, True) and bool(match)
    return np.where(
        _first_of_group(targets), [100.0 * right[group] for group in _groups(targets)], np.nan
    )


MULTIRC_EM = mean_of("exact_match", _multirc_questions)


def normalize_squad(text: str) -> str:
    """Returns the text in lower case without ASCII punctuation and articles, words parted by one
    space.
    """
    return _normalize(text, string.punctuation, "")


def normalize_trivia_qa(text: str) -> str:
    """Returns the text in lower case without articles, punctuation (curly quotes too) turned to
    spaces.
    """
    return _normalize(text, string.punctuation + "‘’´`_", " ")  # noqa: RUF001  the quotes are meant


def best_match(normalize: Callable[[str], str], score: Callable[[str, str], float]) -> Each:
    """Returns what scores normalised answers against the best of the lists of answers that the
    targets are.
    """

    def each(targets: Values, answers: Values) -> NDArray[np.float64]:
        best = []
        for target, answer in zip(targets, answers, strict=True):
            given = normalize(answer)
            best.append(
                100.0 * max((score(normalize(wanted), given) for wanted in target), default=0.0)
            )
        return np.asarray(best)

    return each


def first_of_each_group(each: Each) -> Each:
    """Returns `each` for targets and answers that are mappings; all but the first of a group are
    NaN.
    """

    def deduplicated(targets: Values, answers: Values) -> NDArray[np.float64]:
        return np.where(
            _first_of_group(targets), each(bare_values(targets), bare_values(answers)), np.nan
        )

    return deduplicated


def _overlap(target: str, answer: str) -> float:
    """Returns the F1 of the words of an answer, as bags; 0 when either is empty."""
    target_words, answer_words = target.split(), answer.split()
    shared = sum((Counter(target_words) & Counter(answer_words)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(answer_words), shared / len(target_words)
    return 2 * precision * recall / (precision + recall)


_squad_em = best_match(normalize_squad, lambda target, answer: float(target == answer))
_squad_f1 = best_match(normalize_squad, _overlap)
SQUAD_EM, SQUAD_F1 = mean_of("em", _squad_em), mean_of("f1", _squad_f1)
RECORD_EM, RECORD_F1 = (
    mean_of("em", first_of_each_group(_squad_em)),
    mean_of("f1", first_of_each_group(_squad_f1)),
)
TRIVIA_EM = mean_of(
    "em", best_match(normalize_trivia_qa, lambda target, answer: float(target == answer))
)
TRIVIA_F1 = mean_of("f1", best_match(normalize_trivia_qa, _overlap))


def natural_questions_recall(non_null_threshold: int = 2, normalize: bool = True) -> Metric:
    """Returns the share of questions whose set of answers is one annotator's whole set.

    Args:
        non_null_threshold: Fewest annotators with an answer; questions with fewer do not count.
        normalize: Whether answers are compared as SQuAD's.

    Source:
        t5_cbqa `metrics.natural_questions` (google-research/google-research). Differs: NaN, not an
        error, when no question counts.
    """

    def as_set(answers: Collection[str]) -> frozenset[str]:
        return frozenset(normalize_squad(answer) if normalize else answer for answer in answers)

    def one(target: Sequence[Collection[str]], answer: Sequence[Collection[str]]) -> float:
        wanted = [as_set(group) for group in target if group]
        return (
            100.0 * (as_set(answer[0]) in wanted)
            if len(wanted) >= non_null_threshold
            else float("nan")
        )

    return mean_of(
        "recall",
        lambda targets, answers: np.asarray(list(map(one, targets, answers)), dtype=np.float64),
    )


def rouge(kind: str) -> Metric:
    """Returns the mean ROUGE F-measure of one kind, `rouge1`, `rouge2` or `rougeLsum`; no stemming.

    A sentence ends at a newline and at ` . `.

    Source:
        T5 `rouge_mean`. Differs: no; T5's `rouge` reports the median of unseeded resamples.
    """

    def each(targets: Values, answers: Values) -> NDArray[np.float64]:
        from rouge_score.rouge_scorer import (
            RougeScorer,
        )  # slow to import, and only summaries need it

        scorer = RougeScorer([kind])
        pairs = zip(targets, answers, strict=True)
        sentences = [
            (target.replace(" . ", " .\n"), answer.replace(" . ", " .\n"))
            for target, answer in pairs
        ]
        return np.asarray(
            [100.0 * scorer.score(target, answer)[kind].fmeasure for target, answer in sentences]
        )

    return mean_of(kind, each)


ROUGE1, ROUGE2, ROUGELSUM = rouge("rouge1"), rouge("rouge2"), rouge("rougeLsum")


def correlation(name: str, function: Callable[[Values, Values], Any]) -> Metric:
    """Returns 100 times a correlation; NaN where constant values leave it undefined."""

    def score(targets: Values, answers: Values) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about constant values; the score says it
            return 100 * float(function(targets, answers))

    return Metric(name, score)


def _pearson(targets: Values, answers: Values) -> float:
    """Returns the Pearson correlation in -1..1."""
    from scipy.stats import pearsonr

    return float(np.asarray(pearsonr(targets, answers))[0])


def _spearman(targets: Values, answers: Values) -> float:
    """Returns the Spearman correlation in -1..1."""
    from scipy.stats import spearmanr

    return float(np.asarray(spearmanr(targets, answers))[0])


def _matthews(targets: Values, answers: Values) -> float:
    """Returns the Matthews correlation in -1..1; 0 when either is constant."""
    from sklearn.metrics import matthews_corrcoef

    return matthews_corrcoef(targets, answers)


PEARSON = correlation("pearson_corrcoef", _pearson)
SPEARMAN = correlation("spearman_corrcoef", _spearman)
MATTHEWS = replace(correlation("matthews_corrcoef", _matthews), additive=matthews((-1, 0, 1)))


def _equal_pairs(targets: Values, answers: Values) -> NDArray[np.float64]:
    """Returns <float64>[N] 100 where answers 2i and 2i + 1 are equal, 0 where not, at 2i; NaN
    elsewhere.
    """
    scores = np.full(len(answers), np.nan)
    scores[: len(answers) // 2 * 2 : 2] = exact_matches(answers[0:-1:2], answers[1::2])
    return scores


GENDER_PARITY = mean_of("gender_parity", _equal_pairs)
"""Share of pairs of AX-g, rows 2i and 2i + 1, with the same answer, right or wrong. A constant classifier gets 100.

Source: jiant v1 `jiant/metrics/winogender_metrics.py`.
"""


def superglue_average(scores: Mapping[str, float | Mapping[str, float]]) -> float:
    """Returns the leaderboard's number: the mean of eight tasks, each the mean of its metrics.

    Args:
        scores: By task, as in SUPERGLUE, its score or its two scores by metric; others, as AX-b, do
            not count.

    Raises:
        ConfigError: When a task is missing.
    """
    missing = [task for task in SUPERGLUE if task not in scores]
    if missing:
        raise ConfigError(
            f"The SuperGLUE average needs {', '.join(SUPERGLUE)}; missing: {', '.join(missing)}."
        )
    means = [
        np.mean(list(s.values()) if isinstance(s := scores[task], Mapping) else s)
        for task in SUPERGLUE
    ]
    return float(np.mean(means))


def auc(targets: Values, scores: Sequence[float], weights: Any = None) -> dict[str, float]:
    """Returns the areas under the ROC and the precision-recall curve, in 0..1, of scores of class
    1.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    return {
        "auc-roc": float(roc_auc_score(targets, scores, sample_weight=weights)),
        "auc-pr": float(average_precision_score(targets, scores, sample_weight=weights)),
    }


def rank_classification(
    targets: Sequence[tuple[Sequence[int], bool, float, int]],
    scores: Sequence[float],
    num_classes: int | None = None,
    normalize_by_target_length: bool = False,
) -> dict[str, float]:
    """Returns metrics of the choices with the best scores, all in 0..100.

    Args:
        targets: Of each choice (row, choice), whether it is right, the weight of its row, and its
            length in tokens.
        scores: Log-probabilities of the choices.
        num_classes: Choices of every row; None when they differ, which leaves accuracy alone.
        normalize_by_target_length: Whether scores are divided by lengths.

    Returns:
        `accuracy`; without rows that have several right choices also `mean_Nclass_f1`, or with two
        classes `f1`, `auc-roc` and `auc-pr` of class 1.

    Raises:
        DataError: When the number of choices is no multiple of `num_classes`.
    """
    if len(targets) != len(scores) or (num_classes and len(targets) % num_classes):
        raise DataError(
            f"There are {len(targets)} choices and {len(scores)} scores; expected as many of both, a multiple of the "
            f"{num_classes or 1} classes."
        )
    choices = [
        (row, number, score / length if normalize_by_target_length else score, right, weight)
        for ((row, number), right, weight, length), score in zip(targets, scores, strict=True)
    ]
    choices.sort(key=lambda choice: choice[:2])
    if num_classes is not None:
        return _of_classes(
            np.asarray([choice[2:] for choice in choices], dtype=np.float64).reshape(
                -1, num_classes, 3
            )
        )
    chosen = [
        max(row, key=lambda choice: choice[2])
        for _, row in groupby(choices, key=lambda choice: choice[0])
    ]
    return {
        "accuracy": 100 * float(np.average([c[3] for c in chosen], weights=[c[4] for c in chosen]))
    }


def _of_classes(choices: NDArray[np.float64]) -> dict[str, float]:
    """Returns the metrics of <float64>[N, C, 3] score, rightness and weight of every choice."""
    scores, right, weights = (
        choices[..., 0].astype(np.float32),
        choices[..., 1] == 1,
        choices[:, 0, 2],
    )
    picked = scores.argmax(axis=-1)
    hits = right[np.arange(len(right)), picked]
    accuracy = {"accuracy": 100 * float(np.average(hits, weights=weights))}
    num_classes = right.shape[1]
    if (right.sum(axis=-1) > 1).any():
        return accuracy
    if num_classes > 2:
        options = {"labels": range(num_classes), "average": "macro", "sample_weight": weights}
        f1 = _f1(right.astype(int), np.eye(num_classes, dtype=int)[picked], **options)
        return accuracy | {f"mean_{num_classes}class_f1": 100 * f1}
    f1 = _f1(right.argmax(axis=-1), picked, sample_weight=weights)
    odds = np.exp(scores - scores.max(axis=-1, keepdims=True))
    areas = auc(right[:, 1], odds[:, 1] / odds.sum(axis=-1), weights)
    return accuracy | {"f1": 100 * f1} | {name: 100 * area for name, area in areas.items()}


def _f1(targets: Any, answers: Any, **options: Any) -> float:
    """Returns sklearn's F1 in 0..1; that of a class that never occurs is 0."""
    from sklearn.metrics import f1_score

    options["zero_division"] = 0  # without a warning
    return float(f1_score(targets, answers, **options))


def _groups(targets: Values) -> list[Any]:
    """Returns the `group` of each target; lists, as JSON has them, become tuples."""
    return [tuple(g) if isinstance(g := target["group"], list) else g for target in targets]


def _first_of_group(targets: Values) -> NDArray[np.bool_]:
    """Returns <bool>[N] whether a target is the first of its group."""
    first: dict[Any, int] = {}
    return np.asarray(
        [first.setdefault(group, n) == n for n, group in enumerate(_groups(targets))],
        dtype=np.bool_,
    )


def _normalize(text: str, punctuation: str, replacement: str) -> str:
    """Returns the text in lower case, its punctuation replaced, without articles, words parted by
    one space.
    """
    text = "".join(replacement if letter in punctuation else letter for letter in text.lower())
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())
