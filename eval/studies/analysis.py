"""Conclusions of a study: differences of arms over seeds, with intervals and a verdict.

Comes after `outcomes`, before `report`.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

from eval.studies.outcomes import ArmSize, RunOutcome
from eval.studies.seeds import equivalence_p, holm, paired_difference
from eval.studies.study import Contrast, SettingValue, Study

Verdict = Literal["holds", "does not hold at this scale", "not resolved"]

_LEVEL = 0.05


class ArmNumber(NamedTuple):
    """The number of one arm, at one value of the sweep or over it, with one seed.

    Attributes:
        arm: Name of the arm.
        value: Value of the sweep; None without one, or over all values.
        seed: The seed.
        number: The measure.
        has_diverged: Whether one of its runs has diverged.
    """

    arm: str
    value: SettingValue
    seed: int
    number: float
    has_diverged: bool


A = TypeVar("A", RunOutcome, ArmNumber)


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
        numbers: The number of each arm and seed.
        contrasts: The primary comparison first.
    """

    study: Study
    command: str
    versions: dict[str, str]
    overrides: dict[str, SettingValue]
    outcomes: list[RunOutcome]
    missing: list[str]
    sizes: dict[str, ArmSize]
    numbers: list[ArmNumber]
    contrasts: list[ContrastResult]


def by_arm_and_value(items: Sequence[A]) -> dict[tuple[str, str], list[A]]:
    """Returns runs or numbers by the name of their arm and the text of their value of the sweep."""
    groups: dict[tuple[str, str], list[A]] = {}
    for item in items:
        value = "" if item.value is None else str(item.value)
        groups.setdefault((item.arm, value), []).append(item)
    return groups


# ---------------------------------------------------------------------------
# Numbers


def arm_numbers(study: Study, outcomes: Sequence[RunOutcome]) -> list[ArmNumber]:
    """Returns the number of each arm and seed, the best of the sweep if requested.

    A seed with missing values of the sweep has no best number.
    """
    measure = study.measure
    if study.sweep is None or measure.over_sweep == "each":
        return [
            ArmNumber(run.arm, run.value, run.seed, run.number, run.has_diverged)
            for run in outcomes
        ]

    # All values of an arm and seed together.
    runs_by_arm_seed: dict[tuple[str, int], list[RunOutcome]] = {}
    for run in outcomes:
        runs_by_arm_seed.setdefault((run.arm, run.seed), []).append(run)

    numbers = []
    for (arm, seed), runs in runs_by_arm_seed.items():
        if len(runs) == len(study.sweep.values):
            has_diverged = any(run.has_diverged for run in runs)
            values = [run.number for run in runs]
            best = min(values) if measure.better == "lower" else max(values)
            numbers.append(ArmNumber(arm, None, seed, best, has_diverged))
    return numbers


# ---------------------------------------------------------------------------
# Differences


def contrast_results(study: Study, numbers: Sequence[ArmNumber]) -> list[ContrastResult]:
    """Returns the primary comparison and the secondary ones, whose p-values Holm corrects.

    A comparison of arms that share no seed yet is omitted.
    """
    # Each comparison by itself.
    results = []
    for contrast in _all_contrasts(study):
        result = _contrast_result(study, contrast, numbers, contrast == study.primary)
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


def _all_contrasts(study: Study) -> list[Contrast]:
    """Returns the primary contrast and the others, at each value of a sweep if requested."""
    # The primary one comes first, at its one value of the sweep.
    contrasts = [study.primary]
    is_each = study.sweep is not None and study.measure.over_sweep == "each"
    for contrast in (study.primary, *study.contrasts):
        if is_each and (contrast.at is None or contrast is study.primary):
            assert study.sweep is not None
            for value in study.sweep.values:
                contrasts.append(contrast._replace(at=value))
        elif contrast is not study.primary:
            contrasts.append(contrast)

    # A setting named twice counts once.
    return [item for number, item in enumerate(contrasts) if item not in contrasts[:number]]


def _contrast_result(
    study: Study, contrast: Contrast, numbers: Sequence[ArmNumber], is_primary: bool
) -> ContrastResult | None:
    """Returns one comparison, before any correction; None if no seed has both arms."""
    # Pairs of numbers, one for each seed that both arms have.
    first = _number_by_seed(numbers, contrast.arm, contrast.at)
    second = _number_by_seed(numbers, contrast.against, contrast.at)
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
        is_primary,
        num_seeds=len(seeds),
        difference=paired.mean,
        low=_known(paired.low),
        high=_known(paired.high),
        p_value=_known(paired.p),
        equivalence_p=_known(equivalence_p(arm, against, contrast.margin)),
        verdict="not resolved",
    )


def _number_by_seed(
    numbers: Sequence[ArmNumber], arm: str, value: SettingValue
) -> dict[int, float]:
    return {item.seed: item.number for item in numbers if (item.arm, item.value) == (arm, value)}


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
