"""BLEU and chrF of sacreBLEU, as functions of sums over sentences.

Both are scores of a corpus: n-grams are counted over all sentences, not averaged. A sentence is
tokenized and counted once, and a bootstrap draw adds up the counts of its sentences.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from einops import rearrange
from numpy.typing import NDArray

from stmoe_eval.scores.additive import AdditiveScore, ScoreOfSums
from stmoe_eval.scores.metrics import Metric, Values

_BETA = 2  # weight of recall in chrF


def bleu(name: str, tokenize: str) -> Metric:
    """Returns sacreBLEU's corpus BLEU, in 0..100, with exponential smoothing.

    Args:
        name: Name of the metric.
        tokenize: sacreBLEU's name of a tokenizer: `13a` is what WMT reports, `intl` what T5 does.

    Source:
        T5 `bleu` (for `intl`), sacreBLEU 2 `BLEU`. Differs: no.
    """

    @lru_cache(maxsize=1)
    def scorer() -> Any:
        # Slow to import, and only translations need it.
        from sacrebleu.metrics.bleu import BLEU

        return BLEU(tokenize=tokenize)

    return _corpus_metric(name, scorer, _bleu_of_sums)


def chrf(name: str = "chrf") -> Metric:
    """Returns sacreBLEU's corpus chrF2, in 0..100: characters up to six, no words.

    Source:
        Popovic (2015), "chrF: character n-gram F-score for automatic MT evaluation", sacreBLEU 2
        `CHRF`. Differs: no.
    """

    @lru_cache(maxsize=1)
    def scorer() -> Any:
        from sacrebleu.metrics.chrf import CHRF

        return CHRF(beta=_BETA)

    return _corpus_metric(name, scorer, _chrf_of_sums)


def _corpus_metric(name: str, scorer: Callable[[], Any], score_of_sums: ScoreOfSums) -> Metric:
    """Returns a metric of sacreBLEU, of which `scorer` gives the object."""

    def score(targets: Values, answers: Values) -> float:
        texts = list(answers)
        references = [list(targets)]
        corpus = scorer().corpus_score(texts, references)
        return float(corpus.score)

    # sacreBLEU has no public name for the counts of sentences.
    def terms(targets: Values, answers: Values) -> NDArray[np.float64]:
        texts = list(answers)
        references = [list(targets)]
        counts = scorer()._extract_corpus_statistics(texts, references)
        return np.asarray(counts, dtype=np.float64)

    def signature() -> str:
        # The number of references is known once sentences were counted.
        counter = scorer()
        counter.corpus_score([""], [[""]])
        return f"sacreBLEU, {counter.get_signature()}"

    additive = AdditiveScore(terms, score_of_sums, scores_examples=True)
    return Metric(name, score, additive=additive, signature=signature)


def _bleu_of_sums(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns BLEU.

    Args:
        sums: <float64>[..., 10] words of the answers, words of the targets, then by order of the
            n-grams those that are right, and those of the answers.
    """
    answer_length = sums[..., 0]
    target_length = sums[..., 1]
    right, total = rearrange(sums[..., 2:], "... (kind n) -> kind ... n", kind=2)

    # The i-th order without a right n-gram counts 2^-i of one.
    is_missing = (right == 0) & (total > 0)
    smoothed = 0.5 ** is_missing.cumsum(axis=-1)
    precision = np.where(is_missing, smoothed, right) / np.maximum(total, 1)  # [..., 4]

    # Nothing right, or answers too short for the longest n-grams: the score is 0.
    is_scored = right.any(axis=-1) & (total > 0).all(axis=-1)
    positive = np.where(precision > 0, precision, 1.0)
    log_precision = np.log(positive).mean(axis=-1)

    # Short answers are precise: exp(1 - r / c) corrects this.
    ratio = target_length / np.maximum(answer_length, 1)
    log_penalty = np.minimum(0.0, 1 - ratio)
    score = 100 * np.exp(log_penalty + log_precision)
    return np.where(is_scored, score, 0.0)


def _chrf_of_sums(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns chrF.

    Args:
        sums: <float64>[..., 18] by order of the n-grams, those of the answers, those of the
            targets, and those that both have.
    """
    counts = rearrange(sums, "... (n kind) -> kind ... n", kind=3)
    in_answers, in_targets, in_both = counts

    # Means over the orders of which both have n-grams.
    is_order = (in_answers > 0) & (in_targets > 0)
    num_orders = np.maximum(is_order.sum(axis=-1), 1)
    precisions = in_both / np.maximum(in_answers, 1)
    recalls = in_both / np.maximum(in_targets, 1)
    precision = (precisions * is_order).sum(axis=-1) / num_orders
    recall = (recalls * is_order).sum(axis=-1) / num_orders

    # F = (1 + b^2) P R / (b^2 P + R)
    weight = _BETA**2
    product = (1 + weight) * precision * recall
    denominator = weight * precision + recall
    return 100 * product / np.where(denominator > 0, denominator, 1.0)


BLEU = bleu("bleu", "intl")
BLEU_13A = bleu("bleu_13a", "13a")
CHRF = chrf()
