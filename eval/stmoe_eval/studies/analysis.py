"""Conclusions of a study: differences of arms over seeds, with intervals and a verdict.

Comes after `outcomes`, before `report`.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from stmoe_eval.studies.outcomes import ArmSize, RunOutcome
from stmoe_eval.studies.seeds import equivalence_p, holm, paired_difference
from stmoe_eval.studies.study import Contrast, SettingValue, Study

Verdict = Literal["holds", "does not hold at this scale", "not resolved"]

_LEVEL = 0.05


class ContrastResult(NamedTuple):
    """One comparison of two arms; positive differences favour the first arm.

    Attributes:
        contrast: The declared contrast.
        is_primary: Whether it was declared before the runs.
        num_seeds: Number of seeds that both arms have.
        difference: Mean advantage of the first arm over the seeds.
        low: Lower end of the 95 % interval (paired t); None if seeds show no spread.
        high: Upper end of it.
        p_value: Two-sided p-value, corrected after Holm among the secondary ones.
        equivalence_p: p-value of TOST: that the difference lies outside the margin.
        verdict: Conclusion about the claim.
    """

    contrast: Contrast
    is_primary: bool
    num_seeds: int
    difference: float
    low: float | None
    high: float | None
    p_value: float | None
    equivalence_p: float | None
    verdict: Verdict

    @property
    def verdict_text(self) -> str:
        """The verdict, with a remark for one seed, or for a significant difference within the margin."""
        if self.num_seeds == 1:
            return "one seed: not tested"
        if self.verdict == "holds" and self.is_different and self.is_equal:
            return f"{self.verdict} (significant, but within the margin)"
        return self.verdict

    @property
    def is_different(self) -> bool:
        """Whether the difference is significant."""
        return self.p_value is not None and self.p_value < _LEVEL

    @property
    def is_equal(self) -> bool:
        """Whether the difference is shown to be within the margin."""
        return self.equivalence_p is not None and self.equivalence_p < _LEVEL


class StudyResult(NamedTuple):
    """A study with the outcomes of its runs.

    Attributes:
        study: The study.
        command: The command that made this result.
        versions: Versions of Python and of the libraries that compute the numbers.
        overrides: Settings of the command line that override those of the study.
        outcomes: Every complete run.
        missing: Names of the runs that are not complete.
        sizes: Parameters of the models of each arm, where they are known.
        contrasts: The primary comparison first.
    """

    study: Study
    command: str
    versions: dict[str, str]
    overrides: dict[str, SettingValue]
    outcomes: list[RunOutcome]
    missing: list[str]
    sizes: dict[str, ArmSize]
    contrasts: list[ContrastResult]


def by_arm(outcomes: Sequence[RunOutcome]) -> dict[str, list[RunOutcome]]:
    """Returns runs by the name of their arm."""
    groups: dict[str, list[RunOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.arm, []).append(outcome)
    return groups


# ---------------------------------------------------------------------------
# Differences


def contrast_results(study: Study, outcomes: Sequence[RunOutcome]) -> list[ContrastResult]:
    """Returns the primary comparison and the secondary ones, whose p-values Holm corrects.

    A comparison of arms that share no seed yet is omitted.
    """
    # Each comparison by itself.
    results = []
    for contrast in (study.primary, *study.contrasts):
        result = _contrast_result(study, contrast, outcomes)
        if result is not None:
            results.append(result)

    # The primary one was declared; the others are a family.
    family: dict[int, float] = {}
    for number, result in enumerate(results):
        if not result.is_primary and result.p_value is not None:
            family[number] = result.p_value
    for number, p_value in zip(family, holm(list(family.values())), strict=True):
        results[number] = results[number]._replace(p_value=p_value)
    return [result._replace(verdict=_verdict(result)) for result in results]


def _contrast_result(
    study: Study, contrast: Contrast, outcomes: Sequence[RunOutcome]
) -> ContrastResult | None:
    """Returns one comparison, before any correction; None if no seed has both arms."""
    # Pairs of numbers, one for each seed that both arms have.
    first = _number_by_seed(outcomes, contrast.arm)
    second = _number_by_seed(outcomes, contrast.against)
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None

    # Positive means better, for every metric.
    sign = -1 if study.measure.better == "lower" else 1
    arm = [sign * first[seed] for seed in seeds]
    against = [sign * second[seed] for seed in seeds]

    # Whether there is a difference, and whether it is within the margin.
    paired = paired_difference(arm, against)
    return ContrastResult(
        contrast,
        is_primary=contrast is study.primary,
        num_seeds=len(seeds),
        difference=paired.mean,
        low=_known(paired.low),
        high=_known(paired.high),
        p_value=_known(paired.p),
        equivalence_p=_known(equivalence_p(arm, against, contrast.margin)),
        verdict="not resolved",
    )


def _number_by_seed(outcomes: Sequence[RunOutcome], arm: str) -> dict[int, float]:
    return {outcome.seed: outcome.number for outcome in outcomes if outcome.arm == arm}


def _known(value: float) -> float | None:
    """Returns a number, or None for NaN, which means one seed or no spread."""
    return None if math.isnan(value) else value


def _verdict(result: ContrastResult) -> Verdict:
    """Returns the verdict on the claim of a comparison.

    A claim of a difference holds when that is significant and of the claimed sign. It does not hold
    when the difference is significant the other way, or shown to be within the margin. A claim of
    equality is the other way round.
    """
    if result.contrast.expect == "equal":
        if result.is_equal:
            return "holds"
        return "does not hold at this scale" if result.is_different else "not resolved"

    # A claim of a difference.
    has_claimed_sign = (result.difference > 0) == (result.contrast.expect == "better")
    if result.is_different and has_claimed_sign:
        return "holds"
    is_refuted = result.is_different or result.is_equal
    return "does not hold at this scale" if is_refuted else "not resolved"
