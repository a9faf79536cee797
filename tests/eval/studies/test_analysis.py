"""What a study concludes from its numbers, on numbers of which the conclusion is known."""

import re
from pathlib import Path

import pytest
from scipy import stats

from moe.errors import DataError
from stmoe_eval.studies.analysis import ContrastResult, contrast_results
from stmoe_eval.studies.outcomes import Point
from stmoe_eval.studies.report import (
    contrast_rows,
    read_result,
    study_html,
    study_markdown,
    write_report,
)
from stmoe_eval.studies.study import Contrast, Measure, Study
from tests.eval.studies.results import build, result_of, run, runs_of


def contrast_of(study: Study, numbers: dict[str, list[float]]) -> ContrastResult:
    """Returns the one comparison of a study whose runs came to these numbers."""
    (result,) = contrast_results(study, runs_of(numbers))
    return result


def test_a_lower_loss_is_a_positive_difference_with_the_paired_t_interval() -> None:
    numbers = {"a": [2.0, 2.1, 2.2], "b": [2.5, 2.7, 2.6], "c": [9, 9, 9]}
    result = contrast_of(build(), numbers)

    expected = stats.ttest_rel([2.5, 2.7, 2.6], [2.0, 2.1, 2.2])
    interval = expected.confidence_interval(0.95)
    assert result.difference == pytest.approx(0.5)
    assert (result.low, result.high) == pytest.approx((interval.low, interval.high))
    assert result.p_value == pytest.approx(expected.pvalue)


FAR = {"a": [2.0, 2.1, 2.2], "b": [2.5, 2.7, 2.6]}
NEAR = {"a": [2.0, 2.1, 2.2], "b": [2.0001, 2.1002, 2.2]}
NOISY = {"a": [2.0, 2.9, 2.2], "b": [2.5, 2.1, 2.6]}


@pytest.mark.parametrize(
    ("numbers", "primary", "verdict"),
    [
        (FAR, Contrast("a", "b"), "holds"),
        (FAR, Contrast("b", "a"), "does not hold at this scale"),
        (FAR, Contrast("b", "a", expect="worse"), "holds"),
        (NEAR, Contrast("a", "b", expect="equal", margin=0.01), "holds"),
        (NEAR, Contrast("a", "b", margin=0.01), "does not hold at this scale"),
        (NOISY, Contrast("a", "b"), "not resolved"),
    ],
)
def test_a_claim_holds_is_refuted_or_stays_open(
    numbers: dict[str, list[float]], primary: Contrast, verdict: str
) -> None:
    assert contrast_of(build(primary=primary), numbers).verdict == verdict


def test_without_a_seed_that_both_arms_have_there_is_no_comparison() -> None:
    study = build()
    assert contrast_results(study, runs_of({"a": [2.0]})) == []


@pytest.mark.parametrize("expect", ["better", "equal"])
def test_a_difference_that_is_significant_and_within_the_margin_is_shown_as_both(
    expect: str,
) -> None:
    outcomes = runs_of({"a": [2.0, 2.1, 2.2], "b": [2.0006, 2.1007, 2.2008]})
    study = build(primary=Contrast("a", "b", expect=expect, margin=0.01))
    result = result_of(study, outcomes)
    (item,) = result.contrasts
    assert (item.verdict, item.is_different, item.is_equal) == ("holds", True, True)

    (row,) = contrast_rows(result)
    assert row[2] == "0.01"
    assert row[-1] == "holds (significant, but within the margin)"
    assert f"| {row[-1]} |" in study_markdown(result)


def test_one_seed_or_seeds_without_a_spread_resolve_nothing() -> None:
    for numbers in ({"a": [2.0], "b": [2.5]}, {"a": [2.0] * 3, "b": [2.5] * 3}):
        result = contrast_of(build(), numbers)
        assert (result.difference, result.num_seeds) == (0.5, len(numbers["a"]))
        assert (result.low, result.high, result.p_value) == (None, None, None)
        assert result.verdict == "not resolved"


def test_secondary_comparisons_are_corrected_together_and_the_primary_is_not() -> None:
    study = build(contrasts=[Contrast("a", "c"), Contrast("b", "c")])
    numbers = {"a": [2.0, 2.1, 2.2], "b": [2.5, 2.7, 2.6], "c": [3.0, 3.3, 3.5]}
    primary, first, second = contrast_results(study, runs_of(numbers))
    assert primary.p_value == pytest.approx(stats.ttest_rel(numbers["b"], numbers["a"]).pvalue)

    # Holm: the smaller one times two, the larger one at least as large as that.
    low, high = sorted(stats.ttest_rel(numbers["c"], numbers[arm]).pvalue for arm in ("a", "b"))
    found = sorted([first.p_value, second.p_value])
    assert found == pytest.approx([2 * low, max(2 * low, high)])


def curve(*values: float | None) -> list[Point]:
    return [Point(10 * number, value) for number, value in enumerate(values)]


def test_a_result_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    outcomes = [
        run("a", 0, 1.0, curve=curve(9.0, 3.0), routers={"router/encoder/entropy": 1.5}),
        run("b", 0, 2.0, curve=curve(9.0, None), has_diverged=True),
    ]
    result = result_of(build(), outcomes)
    result = result._replace(overrides={"training.steps": 7}, missing=["c, seed 0"])
    write_report(result, tmp_path)
    text = (tmp_path / "study.md").read_text()

    assert read_result(tmp_path / "study.json") == result
    with pytest.raises(DataError, match=r"outcomes\.0\.steps is 0"):
        write_report(result._replace(outcomes=[run("a", 0, 1.0, steps=0)]), tmp_path)
        read_result(tmp_path / "study.json")
    for part in ("Diverged: b, seed 0", "Missing runs (1): c, seed 0", "training.steps = 7"):
        assert part in text


def test_the_page_of_a_study_loads_nothing_and_escapes_names() -> None:
    outcomes = [run("a", 0, 1.0, curve=curve(9.0, 3.0)), run("b", 0, 2.0, curve=curve(9.0, 4.0))]
    page = study_html(result_of(build(title="A < B"), outcomes))
    assert "A &lt; B" in page
    assert page.count("<svg") == 2
    addresses = set(re.findall(r"http://([\w.]+)", page))
    assert addresses <= {"www.w3.org", "purl.org", "creativecommons.org"}  # names of namespaces


def test_axes_of_a_study_have_units() -> None:
    points = curve(9.0, 3.0)
    outcomes = [run("a", seed, 1.0, curve=points) for seed in (0, 1)]
    outcomes += [run("b", seed, 1.5 + seed, curve=points) for seed in (0, 1)]
    page = study_html(result_of(build(measure=Measure("heldout/loss", unit="nats")), outcomes))
    for label in (
        "heldout/loss (nats per token)",
        "training tokens (millions)",
        "first arm better by (nats), with 95 % interval",
    ):
        assert f">{label}<" in page
    formula = result_of(build(measure=Measure("eval/$x", unit=r"$\nope$")), outcomes)
    assert r">eval/$x ($\nope$)<" in study_html(formula)
    for header in ("better by (nats)", "margin (nats)", "95 % interval (nats)"):
        assert re.search(rf"<th[^>]*>{re.escape(header)}</th>", page)

    # Curves without tokens, and numbers over a rate.
    measure = Measure("eval/mean", better="higher", unit="points")
    arms = {"a": {"optim.lr": 0.02}, "b": {"optim.lr": 0.005}}
    outcomes = [run(arm, 0, 15.0, tokens=None, curve=points) for arm in arms]
    study = build(measure=measure, seeds=[0], arms=arms, plot_over="optim.lr")
    page = study_html(result_of(study, outcomes))
    for label in ("eval/mean (%)", "training step", "optim.lr", "0.02", "0.005"):
        assert f">{label}<" in page


def test_one_seed_has_no_interval_and_no_verdict() -> None:
    result = result_of(build(seeds=[0]), [run("a", 0, 1.0), run("b", 0, 2.0)])
    for text in (study_markdown(result), study_html(result)):
        assert "One planned seed" in text
        assert "one seed: no interval" in text
        assert "one seed: not tested" in text
        assert "not resolved" not in text
        assert "of which" not in text
    assert result.contrasts[0].verdict == "not resolved"


def test_arms_that_differ_by_a_setting_alone_are_one_line_over_it() -> None:
    arms = {}
    for optimizer in ("lamb", "adamw"):
        for batch in (48, 192):
            arms[f"{optimizer}-{batch}"] = {"training.batch_size": batch}
    primary = Contrast("lamb-48", "lamb-192")
    study = build(arms=arms, plot_over="training.batch_size", primary=primary)
    page = study_html(result_of(study, runs_of({arm: [2.0, 2.1, 2.2] for arm in arms})))

    # Words of a figure are text in SVG, or comments beside their outlines.
    assert "Over training.batch_size" in page
    figure = page[page.index("Over training.batch_size") :]
    assert "lamb" in figure
    assert "lamb-48" not in figure[: figure.index("</svg>")]
