"""Metrics in 0..100 of post-processed targets and answers.

Source of all of it: T5 `t5/evaluation/metrics.py` and `qa_utils.py`
(google-research/text-to-text-transfer-transformer at e081111) unless another is named. Values of
MultiRC and ReCoRD are mappings: `value`, and `group` in targets.
"""

import math
import re
import string
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe.training.pair_scores import rouge_fmeasures, word_f1
from stmoe_eval.scores.additive import AdditiveScore, matthews, mean_f1, mean_of_sums, mean_terms

Values = Sequence[Any]
"""Post-processed targets or answers, one for each example, in the order of the examples."""

ExampleScorer = Callable[[Values, Values], NDArray[np.float64]]
"""(N targets, N answers) to <float64>[N] scores in 0..100; NaN for examples that do not count."""


@dataclass(frozen=True)
class Metric:
    """A score of a whole split.

    Attributes:
        name: Name in the report.
        score: (targets, answers) to a number in 0..100; correlations may be below 0.
        score_examples: (targets, answers) to <float64>[N] scores whose mean over those that are not
            NaN is `score`: examples that do not count, as a repeated query, are NaN. None if the
            score is not a mean.
        additive: Computes the score from sums; None if that is impossible. It is possible for every mean.
        signature: Returns the library, its version and its settings, where these decide the score.
    """

    name: str
    score: Callable[[Values, Values], float]
    score_examples: ExampleScorer | None = None
    additive: AdditiveScore | None = None
    signature: Callable[[], str] | None = None


def mean_of(name: str, score_examples: ExampleScorer) -> Metric:
    """Returns the metric that is the mean of scores of examples; NaN when no example counts."""

    def score(targets: Values, answers: Values) -> float:
        scores = score_examples(targets, answers)
        counted = scores[~np.isnan(scores)]
        return float(counted.mean()) if counted.size else math.nan

    def terms(targets: Values, answers: Values) -> NDArray[np.float64]:
        return mean_terms(score_examples(targets, answers))

    additive = AdditiveScore(terms, mean_of_sums, (0.0, 100.0), scores_examples=True)
    return Metric(name, score, score_examples, additive)


def unwrap_values(values: Values) -> list[Any]:
    """Returns the `value` of each that is a mapping, and others as they are."""
    unwrapped = []
    for value in values:
        unwrapped.append(value["value"] if isinstance(value, Mapping) else value)
    return unwrapped


# ---------------------------------------------------------------------------
# Accuracy and F1 of classes


def exact_matches(targets: Values, answers: Values) -> NDArray[np.float64]:
    """Returns <float64>[N] 100 where an answer equals its target, 0 elsewhere."""
    pairs = zip(targets, answers, strict=True)
    return np.asarray([100.0 * (target == answer) for target, answer in pairs])


ACCURACY = mean_of("accuracy", exact_matches)


def mean_multiclass_f1(num_classes: int) -> Metric:
    """Returns the mean F1 of the classes 0 .. num_classes - 1; 0 for a class that never occurs."""
    labels = range(num_classes)

    def score(targets: Values, answers: Values) -> float:
        return 100 * _f1(targets, answers, labels=labels, average="macro")

    return Metric(f"mean_{num_classes}class_f1", score, additive=mean_f1(labels))


def f1_score_with_invalid(targets: Values, answers: Values) -> float:
    """Returns the F1 of class 1; an answer other than 0 and 1 counts as the wrong one of them."""
    return 100 * _f1(targets, _replace_invalid(targets, answers))


def _multirc_f1a(targets: Values, answers: Values) -> float:
    return f1_score_with_invalid(unwrap_values(targets), unwrap_values(answers))


def _replace_invalid(targets: Values, answers: Values) -> list[int]:
    """Returns the answers, with any but 0 and 1 replaced by the wrong one of these two."""
    valid = []
    for target, answer in zip(targets, answers, strict=True):
        valid.append(answer if answer in (0, 1) else 1 - target)
    return valid


_F1_OF_CLASS_1 = mean_f1([1])


def _f1_terms(targets: Values, answers: Values) -> NDArray[np.float64]:
    """Returns <float64>[N, 3] the terms of `f1_score_with_invalid`; see `AdditiveScore`."""
    return _F1_OF_CLASS_1.terms(targets, _replace_invalid(targets, answers))


def _multirc_f1a_terms(targets: Values, answers: Values) -> NDArray[np.float64]:
    return _f1_terms(unwrap_values(targets), unwrap_values(answers))


MACRO_F1 = mean_multiclass_f1(3)
F1_WITH_INVALID = Metric(
    "f1", f1_score_with_invalid, additive=_F1_OF_CLASS_1._replace(terms=_f1_terms)
)
MULTIRC_F1A = Metric("f1", _multirc_f1a, additive=_F1_OF_CLASS_1._replace(terms=_multirc_f1a_terms))


def _multirc_questions(targets: Values, answers: Values) -> NDArray[np.float64]:
    """Returns <float64>[N] 100 at the first answer of a question that is all right, 0 at the first
    answer of another one, NaN elsewhere.
    """
    groups = _groups(targets)
    matches = exact_matches(unwrap_values(targets), unwrap_values(answers)) == 100
    all_right: dict[Any, bool] = {}
    for group, match in zip(groups, matches, strict=True):
        all_right[group] = all_right.get(group, True) and bool(match)

    # A question counts once, at its first answer.
    question_scores = [100.0 * all_right[group] for group in groups]
    return np.where(_first_of_group(targets), question_scores, np.nan)


MULTIRC_EM = mean_of("exact_match", _multirc_questions)


# ---------------------------------------------------------------------------
# Questions with free answers


def normalize_squad(text: str) -> str:
    """Returns the text in lower case without ASCII punctuation and articles, single-spaced."""
    return _normalize(text, string.punctuation, "")


def normalize_trivia_qa(text: str) -> str:
    """Returns the text in lower case without articles, single-spaced; punctuation, curly quotes
    too, turns to spaces.
    """
    return _normalize(text, string.punctuation + "‘’´`_", " ")  # noqa: RUF001  the quotes are meant


def _normalize(text: str, punctuation: str, replacement: str) -> str:
    """Returns the text in lower case, its punctuation replaced, without articles, single-spaced."""
    text = text.lower().translate(dict.fromkeys(map(ord, punctuation), replacement))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def best_match(
    normalize: Callable[[str], str], score: Callable[[str, str], float]
) -> ExampleScorer:
    """Returns a function that scores an answer against the best of the accepted answers.

    Args:
        normalize: Applied to both before they are compared.
        score: (accepted answer, answer) to 0..1.

    Returns:
        The scorer; its targets are lists of accepted answers.
    """

    def score_examples(targets: Values, answers: Values) -> NDArray[np.float64]:
        best_scores = []
        for target, answer in zip(targets, answers, strict=True):
            normalized = normalize(answer)
            scores = [score(normalize(accepted), normalized) for accepted in target]
            best_scores.append(100.0 * max(scores, default=0.0))
        return np.asarray(best_scores)

    return score_examples


def first_of_each_group(score_examples: ExampleScorer) -> ExampleScorer:
    """Returns a scorer of values with groups, of which only the first of each counts."""

    def score_first(targets: Values, answers: Values) -> NDArray[np.float64]:
        scores = score_examples(unwrap_values(targets), unwrap_values(answers))
        return np.where(_first_of_group(targets), scores, np.nan)

    return score_first


def _equality(target: str, answer: str) -> float:
    return float(target == answer)


_squad_em = best_match(normalize_squad, _equality)
_squad_f1 = best_match(normalize_squad, word_f1)
SQUAD_EM = mean_of("em", _squad_em)
SQUAD_F1 = mean_of("f1", _squad_f1)
RECORD_EM = mean_of("em", first_of_each_group(_squad_em))
RECORD_F1 = mean_of("f1", first_of_each_group(_squad_f1))
TRIVIA_EM = mean_of("em", best_match(normalize_trivia_qa, _equality))
TRIVIA_F1 = mean_of("f1", best_match(normalize_trivia_qa, word_f1))


# ---------------------------------------------------------------------------
# Summaries


def rouge(kind: str) -> Metric:
    """Returns the mean ROUGE F-measure of one kind, `rouge1`, `rouge2` or `rougeLsum`; no stemming."""

    def score_examples(targets: Values, answers: Values) -> NDArray[np.float64]:
        return 100.0 * np.asarray(rouge_fmeasures(kind, targets, answers))

    return mean_of(kind, score_examples)


ROUGE1 = rouge("rouge1")
ROUGE2 = rouge("rouge2")
ROUGELSUM = rouge("rougeLsum")


# ---------------------------------------------------------------------------
# Correlations and pairs


def correlation(name: str, function: Callable[[Values, Values], Any]) -> Metric:
    """Returns 100 times a correlation; NaN where constant values leave it undefined."""

    def score(targets: Values, answers: Values) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about constant values; the score says it
            return 100 * float(function(targets, answers))

    return Metric(name, score)


def _pearson(targets: Values, answers: Values) -> float:
    from scipy.stats import pearsonr

    return float(np.asarray(pearsonr(targets, answers))[0])


def _spearman(targets: Values, answers: Values) -> float:
    from scipy.stats import spearmanr

    return float(np.asarray(spearmanr(targets, answers))[0])


def _matthews(targets: Values, answers: Values) -> float:
    """Returns the Matthews correlation in -1..1; 0 when either is constant."""
    from sklearn.metrics import matthews_corrcoef

    return matthews_corrcoef(targets, answers)


PEARSON = correlation("pearson_corrcoef", _pearson)
SPEARMAN = correlation("spearman_corrcoef", _spearman)
MATTHEWS = replace(correlation("matthews_corrcoef", _matthews), additive=matthews((-1, 0, 1)))
MATTHEWS_OF_THREE = replace(MATTHEWS, additive=matthews((-1, 0, 1, 2)))
"""The same for entailment, neutral and contradiction."""


def _equal_pairs(targets: Values, answers: Values) -> NDArray[np.float64]:
    """Returns <float64>[N] 100 where answers 2i and 2i + 1 are equal, 0 where not, at 2i; NaN
    elsewhere.
    """
    scores = np.full(len(answers), np.nan)
    num_paired = len(answers) // 2 * 2
    scores[:num_paired:2] = exact_matches(answers[0:-1:2], answers[1::2])
    return scores


GENDER_PARITY = mean_of("gender_parity", _equal_pairs)
"""Share of pairs of AX-g, rows 2i and 2i + 1, with the same answer, right or wrong. A constant classifier gets 100.

Source: jiant v1 `jiant/metrics/winogender_metrics.py`.
"""


def _f1(targets: Any, answers: Any, **options: Any) -> float:
    """Returns sklearn's F1 in 0..1; 0 for a class that never occurs, without a warning."""
    from sklearn.metrics import f1_score

    options["zero_division"] = 0
    return float(f1_score(targets, answers, **options))


# ---------------------------------------------------------------------------
# Groups of MultiRC and ReCoRD


def _groups(targets: Values) -> list[Any]:
    """Returns the `group` of each target; JSON's lists become tuples."""
    groups = []
    for target in targets:
        group = target["group"]
        groups.append(tuple(group) if isinstance(group, list) else group)
    return groups


def _first_of_group(targets: Values) -> NDArray[np.bool_]:
    """Returns <bool>[N] whether a target is the first of its group."""
    seen = set()
    is_first = []
    for group in _groups(targets):
        is_first.append(group not in seen)
        seen.add(group)
    return np.asarray(is_first, dtype=np.bool_)
