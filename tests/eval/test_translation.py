"""BLEU and chrF by sums beside sacreBLEU's scores of texts."""

import random

import pytest
import sacrebleu

from stmoe_eval.scores.intervals import score_answers, score_metrics
from stmoe_eval.scores.translation import BLEU, BLEU_13A, CHRF
from stmoe_eval.task import TASKS
from tests.eval.rows import examples_of

TEXT = "the boat, the bus; a “red” house is (not) at 7.30 a-b in Brügge și 1,000 km away"
WORDS = TEXT.split()


def sentences(seed, num, longest=13):
    rng = random.Random(seed)
    targets = []
    answers = []
    for _ in range(num):
        target = rng.choices(WORDS, k=rng.randint(1, longest))
        answer = [word if rng.random() < 0.7 else rng.choice(WORDS) for word in target]
        targets.append(" ".join(target))
        answers.append(" ".join(answer[: rng.randint(0, longest)]))
    return targets, answers


def by_sums(metric, targets, answers):
    return float(metric.additive.score_of_sums(metric.additive.terms(targets, answers).sum(axis=0)))


def test_the_scores_are_sacrebleus():
    targets, answers = sentences(0, 29)
    expected = {
        BLEU: sacrebleu.corpus_bleu(answers, [targets], tokenize="intl"),
        BLEU_13A: sacrebleu.corpus_bleu(answers, [targets]),
        CHRF: sacrebleu.corpus_chrf(answers, [targets]),
    }
    for metric, theirs in expected.items():
        assert 20 < metric.score(targets, answers) < 80
        assert metric.score(targets, answers) == pytest.approx(theirs.score)
    assert BLEU.score(targets, answers) != BLEU_13A.score(targets, answers)


@pytest.mark.parametrize("metric", [BLEU, BLEU_13A, CHRF], ids=lambda metric: metric.name)
def test_the_scores_of_sums_are_those_of_the_texts(metric):
    """Short texts lack longer n-grams, and smoothing decides."""
    for seed in range(23):
        targets, answers = sentences(seed, num=1 + seed % 4, longest=(2, 5, 13)[seed % 3])
        expected = metric.score(targets, answers)
        assert by_sums(metric, targets, answers) == pytest.approx(expected, abs=1e-9)

    # Nothing answered scores nothing, and everything scores all.
    targets, _ = sentences(1, 7)
    assert by_sums(metric, targets, [""] * 7) == metric.score(targets, [""] * 7) == 0
    assert by_sums(metric, targets, ["?!"] * 7) == pytest.approx(metric.score(targets, ["?!"] * 7))
    assert by_sums(metric, targets, targets) == pytest.approx(100)


def test_the_interval_is_that_of_sacrebleus_own_bootstrap():
    targets, answers = sentences(2, 211)
    groups = [str(i) for i in range(211)]
    scores, _ = score_metrics(score_answers([BLEU_13A, CHRF], targets, answers), groups)
    own = {"bleu_13a": sacrebleu.metrics.BLEU(), "chrf": sacrebleu.metrics.CHRF()}
    for name, scorer in own.items():
        theirs = scorer.corpus_score(answers, [targets], n_bootstrap=1000)
        half = (scores[name].high - scores[name].low) / 2
        assert scores[name].value == pytest.approx(theirs.score)
        assert half == pytest.approx(theirs._ci, rel=0.15)


def test_the_tasks_ask_as_t5_does():
    for name, language in (("de", "German"), ("fr", "French"), ("ro", "Romanian")):
        task = TASKS.get(f"wmt_en_{name}")
        example, *_ = examples_of(task, "test")
        assert example.inputs == f"translate English to {language}: She has three brothers."
        assert task.decoding == (128, 4, 0.6)
