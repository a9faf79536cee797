"""Matching of questions and answers: what is likely whatever is asked tells nothing."""

import math
from dataclasses import replace

import numpy as np
import pytest

from eval.baselines.classifiers import BaselineData, baseline_outputs
from eval.reports.task_summary import score_system, with_matching
from eval.scores.matching import MATCHING, matching_scores


def test_two_questions_are_matched_by_the_sum_of_their_scores():
    # The first prefers b by 1, the second by 3: together they are right.
    right = ["a", "b"]
    assert matching_scores([{"a": 2, "b": 3}, {"a": 0, "b": 3}], right).tolist() == [100, 100]
    assert matching_scores([{"a": 2, "b": 3}, {"a": 3, "b": 3}], right).tolist() == [0, 0]
    assert matching_scores([{"a": 2, "b": 3}, {"a": 2, "b": 3}], right).tolist() == [50, 50]


def test_what_is_added_to_a_word_or_a_question_changes_nothing():
    rng = np.random.default_rng(0)
    words = ["a", "b", "c", "d"]
    table = rng.normal(size=(4, 4))
    shifted = table + 50 * rng.normal(size=(1, 4)) + 50 * rng.normal(size=(4, 1))
    rows = [[dict(zip(words, row, strict=True)) for row in each] for each in (table, shifted)]
    assert matching_scores(rows[0], words).tolist() == matching_scores(rows[1], words).tolist()


def test_it_is_the_share_of_pairs_by_hand():
    rng = np.random.default_rng(1)
    words = ["a", "b", "c"]
    scores = [dict(zip(words, rng.normal(size=3), strict=True)) for _ in words]
    wins = 0
    for n, m in ((0, 1), (0, 2), (1, 2)):
        right = scores[n][words[n]] + scores[m][words[m]]
        wins += right > scores[n][words[m]] + scores[m][words[n]]
    assert matching_scores(scores, words).mean() == pytest.approx(100 * wins / 3)


def test_a_question_alone_counts_for_nothing():
    values = matching_scores(
        [{"a": 2, "b": 3}, {"a": 0, "b": 3}, {"x": 1.0, "y": 0.0}], ["a", "b", "x"]
    )
    assert values.tolist() == pytest.approx([100, 100, math.nan], nan_ok=True)


def test_it_stands_beside_the_accuracy_of_models_and_baselines(task):
    of_words = replace(task, has_lexical_choices=True)
    examples = of_words.examples("validation")
    baseline = baseline_outputs(of_words, BaselineData(examples), examples)["nearest example"]
    scored = score_system(of_words, examples, baseline.outputs, "x", "baseline")
    matched = with_matching(scored, of_words, examples, baseline.scores)
    assert [score.metric for score in matched.result.scores] == ["accuracy", MATCHING.name]
    assert matched.result.scores[1].value > 50

    # Tasks of other kinds, and generated answers, have none.
    assert with_matching(scored, of_words, examples, None) == scored
    assert with_matching(scored, task, examples, baseline.scores) == scored
