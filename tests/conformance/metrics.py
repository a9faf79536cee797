"""Metrics by T5's names: from `{targets, predictions, **options}` to numbers by name.

The name may hold another metric or a number in brackets, as `mean_group_metric(squad)`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stmoe_eval.scores import metrics
from stmoe_eval.scores.metrics import Metric
from stmoe_eval.scores.superglue import superglue_average
from tests.conformance import t5_functions
from tests.conformance.case import CaseFunction, CaseFunctions, CaseInput, find_function

MetricValues = dict[str, float]

# ---------------------------------------------------------------------------
# From a case to a call


def _scores(*chosen: Metric) -> CaseFunction:
    """Returns a function that computes metrics by name."""

    def call(given: CaseInput) -> MetricValues:
        scores: MetricValues = {}
        for metric in chosen:
            scores[metric.name] = metric.score(given["targets"], given["predictions"])
        return scores

    return call


def _mean_multiclass_f1(given: CaseInput) -> MetricValues:
    """Returns the mean F1 of as many classes as `num_classes` or the brackets say."""
    in_brackets = re.search(r"(\d+)\)?$", given["metric"])
    num_classes = given.get("num_classes") or int(in_brackets[1] if in_brackets else 3)
    return _scores(metrics.mean_multiclass_f1(num_classes))(given)


def _multirc_exact_match(given: CaseInput) -> MetricValues:
    """Returns the share of questions that are all right; without groups all are one question."""
    targets = given["targets"]
    predictions = given["predictions"]
    # Answers that are not grouped are those of one question.
    if targets and not isinstance(targets[0], Mapping):
        targets = [{"group": 0, "value": value} for value in targets]
        predictions = [{"value": value} for value in predictions]

    score = metrics.MULTIRC_EM.score(targets, predictions)
    return {"exact_match": score, "em": score}


def _natural_questions(given: CaseInput) -> MetricValues:
    """Returns the recall of whole sets of answers, and how many questions have answers enough."""
    threshold = given.get("non_null_threshold", 2)
    recall = t5_functions.natural_questions_recall(threshold, given.get("normalize_answers", True))

    num_golden = 0
    for answer_sets in given["targets"]:
        num_golden += sum(map(bool, answer_sets)) >= threshold
    return {**_scores(recall)(given), "golden_answers": num_golden}


def _rank_classification(given: CaseInput) -> MetricValues:
    """Returns the metrics of ranked choices."""
    return t5_functions.rank_classification(
        given["targets"],
        given.get("scores", given.get("predictions", ())),
        given.get("num_classes") or None,
        given.get("normalize_by_target_length", False),
    )


def _gender_parity(given: CaseInput) -> MetricValues:
    """Returns the share of equal pairs; targets do not matter."""
    answers: Sequence[Any] = given["predictions"]
    parity = metrics.GENDER_PARITY.score(given.get("targets", answers), answers)
    return {"gender_parity": parity}


def _normalize_squad(given: CaseInput) -> str:
    return metrics.normalize_squad(given["text"])


def _normalize_trivia_qa(given: CaseInput) -> str:
    return metrics.normalize_trivia_qa(given["text"])


def _superglue_average(given: CaseInput) -> MetricValues:
    return {"average": float(superglue_average(given["scores"]))}


def _auc(given: CaseInput) -> MetricValues:
    return t5_functions.auc(given["targets"], given["predictions"])


# ---------------------------------------------------------------------------
# Metrics of groups, with another metric inside


def _mean_group_metric(given: CaseInput) -> MetricValues:
    """Returns the means over groups of the scores of each group."""
    groups = _groups(given)
    sums: MetricValues = {}
    for members in groups:
        for name, score in _inner_scores(given, members).items():
            sums[name] = sums.get(name, 0.0) + score
    return {name: total / len(groups) for name, total in sums.items()}


def _deduplicate_metric(given: CaseInput) -> MetricValues:
    """Returns the scores of the first example of each group."""
    return _inner_scores(given, [members[0] for members in _groups(given)])


def _groups(given: CaseInput) -> list[list[int]]:
    """Returns the numbers of the examples of each group."""
    groups: dict[str, list[int]] = {}
    for number, target in enumerate(given["targets"]):
        groups.setdefault(json.dumps(target["group"]), []).append(number)
    return list(groups.values())


def _inner_scores(given: CaseInput, members: Sequence[int]) -> MetricValues:
    """Returns the scores of some examples by the metric in brackets.

    Without brackets it is the metric that T5 has there: SQuAD's for ReCoRD, else whether all of a
    question is right.
    """
    in_brackets = re.search(r"\((?:\w+\.)*([^()]*)\)", given["metric"])
    if in_brackets:
        name = in_brackets[1]
    elif given["metric"].startswith("deduplicate"):
        name = "squad"
    else:
        name = "all_match"

    inner: CaseInput = {"metric": name, "targets": [], "predictions": []}
    for number in members:
        inner["targets"].append(given["targets"][number]["value"])
        inner["predictions"].append(given["predictions"][number]["value"])
    return find_function(METRICS, name)(inner)


# ---------------------------------------------------------------------------
# The table

_multirc_f1 = _scores(metrics.MULTIRC_F1A)
_record = _scores(metrics.RECORD_EM, metrics.RECORD_F1)
_rouge = _scores(metrics.ROUGE1, metrics.ROUGE2, metrics.ROUGELSUM)
_pearson = _scores(metrics.PEARSON)
_spearman = _scores(metrics.SPEARMAN)
_matthews = _scores(metrics.MATTHEWS)

METRICS: CaseFunctions = {
    # Classes.
    "accuracy": _scores(metrics.ACCURACY),
    "sequence_accuracy": _scores(replace(metrics.ACCURACY, name="sequence_accuracy")),
    "mean_multiclass_f1": _mean_multiclass_f1,
    "f1_score_with_invalid": _scores(metrics.F1_WITH_INVALID),
    "rank_classification": _rank_classification,
    "auc": _auc,
    "score_auc": _auc,
    "gender_parity": _gender_parity,
    # Questions with several answers.
    "multirc_f1_over_all_answers": _multirc_f1,
    "multirc_f1a": _multirc_f1,
    "exact_match": _multirc_exact_match,
    "multirc_exact_match": _multirc_exact_match,
    "multirc_em": _multirc_exact_match,
    "all_match": _multirc_exact_match,
    # Groups; what `mean_group_metric` would compute of each question is computed at once.
    "mean_group_metric": _mean_group_metric,
    "mean_group_metric(exact_match)": _multirc_exact_match,
    "mean_group_metric(multirc_exact_match)": _multirc_exact_match,
    "mean_group_metric(multirc_em)": _multirc_exact_match,
    "mean_group_metric(all_match)": _multirc_exact_match,
    "deduplicate_metric": _deduplicate_metric,
    "deduplicate_metric(squad)": _record,
    "record": _record,
    # Free answers.
    "squad": _scores(metrics.SQUAD_EM, metrics.SQUAD_F1),
    "trivia_qa": _scores(metrics.TRIVIA_EM, metrics.TRIVIA_F1),
    "natural_questions": _natural_questions,
    "natural_questions_recall": _natural_questions,
    "nq_recall": _natural_questions,
    "normalize_squad": _normalize_squad,
    "normalize_trivia_qa": _normalize_trivia_qa,
    # Summaries.
    "rouge": _rouge,
    "rouge_mean": _rouge,
    "rouge1": _scores(metrics.ROUGE1),
    "rouge2": _scores(metrics.ROUGE2),
    "rougeLsum": _scores(metrics.ROUGELSUM),
    # Correlations.
    "pearson_corrcoef": _pearson,
    "pearson": _pearson,
    "spearman_corrcoef": _spearman,
    "spearman": _spearman,
    "matthews_corrcoef": _matthews,
    "sklearn_metrics_wrapper": _matthews,
    # Averages over tasks.
    "superglue_average": _superglue_average,
    "super_glue_average": _superglue_average,
}
