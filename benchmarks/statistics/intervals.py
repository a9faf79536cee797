"""Coverage of a report's intervals: how often they contain the true value of a simulation.

Answers are drawn with a given probability of being right, independently or in groups with equal
answers. Bootstrap percentiles are measured for comparison.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.machine import describe_machine, save_report
from eval.scores.additive import ScoreOfSums
from eval.scores.interval_methods import Interval, percentile_interval
from eval.scores.intervals import (
    RESAMPLES,
    ScoredAnswers,
    examples_by_group,
    group_sums,
    metric_interval,
    score_answers,
)
from eval.scores.metrics import ACCURACY, F1_WITH_INVALID, MATTHEWS, Metric
from eval.scores.pairing import difference_interval
from moe.inspection.tables import format_table

BAR = 90.0
"""Per cent of the samples in which an interval of 95 % has to hold the true value."""

_METRICS = (ACCURACY, F1_WITH_INVALID, MATTHEWS)
_ROUNDING = 1e-9
_POPULATION = 1_000_000  # examples for computing the true scores


@dataclass(frozen=True)
class IntervalCase:
    """The samples that are drawn: binary classification with classes of a given share.

    Attributes:
        chances: Probabilities that an answer is right.
        rivals: Chances of a second system, one for each of `chances`; differences are between the two.
        sizes: Numbers of examples.
        share: Share of class 1 among the targets.
        group_sizes: Sizes that a group may have; all equally frequent.
        correlation: Correlation of the correctness of two answers in one group.
        agreement: How often the second system is right where the first is, beyond chance.
    """

    chances: tuple[float, ...] = (0.02, 0.1, 0.5, 0.9, 0.98)
    rivals: tuple[float, ...] = (0.05, 0.06, 0.45, 0.85, 0.94)
    sizes: tuple[int, ...] = (30, 56, 100, 250, 1000)
    share: float = 0.5
    group_sizes: tuple[int, ...] = (1, 3, 5, 7, 9)
    correlation: float = 0.3
    agreement: float = 0.5


@dataclass(frozen=True)
class IntervalBenchmark:
    """What to measure; the fields are the command's options.

    Attributes:
        repeats: Samples of each case.
        seed: Seed of the samples.
        jobs: Processes that share the cases; the numbers do not depend on it.
        json: File of the table; None for none.
        case: Case to draw from.
    """

    repeats: int = 1000
    seed: int = 0
    jobs: int = 1
    json: Path | None = None
    case: IntervalCase = IntervalCase()


class Setting(NamedTuple):
    """A row of the table but for its metric.

    Attributes:
        chance: Probability that an answer of the first system is right.
        rival: Probability for the second system; None for the score of one system.
        size: Number of examples.
        grouped: Whether examples come in groups.
    """

    chance: float
    rival: float | None
    size: int
    grouped: bool


class Sample(NamedTuple):
    """N examples, and the answers of two systems.

    Attributes:
        groups: Name of each example's group.
        targets: Class 0 or 1 of each.
        answers: Answers of the first system.
        rival_answers: Answers of the second system.
    """

    groups: list[str]
    targets: list[int]
    answers: list[int]
    rival_answers: list[int]


class Tally(NamedTuple):
    """Coverage and width of the intervals of one method.

    Attributes:
        coverage: Percentage of intervals that contain the true value.
        width: Their mean width, in points.
    """

    coverage: float
    width: float


def run_intervals(benchmark: IntervalBenchmark) -> None:
    """Measures all cases, prints the table and writes the report."""
    settings = list(_settings(benchmark.case))
    numbers = range(len(settings))
    rows = []
    with ProcessPoolExecutor(benchmark.jobs, get_context("spawn")) as pool:
        measured = pool.map(partial(_measure, benchmark), numbers, settings)
        for of_setting in tqdm(measured, desc="intervals", total=len(settings), mininterval=1.0):
            rows += of_setting

    report = {
        **describe_machine(torch.device("cpu")),
        "repeats": benchmark.repeats,
        "seed": benchmark.seed,
        "bar": BAR,
        "case": asdict(benchmark.case),
        "rows": rows,
    }
    save_report(report, benchmark.json)
    print(format_report(report))


def _settings(case: IntervalCase) -> Iterator[Setting]:
    """Yields every case: scores of one system first, then differences of two."""
    for rivals in ([None] * len(case.chances), case.rivals):
        for grouped in (False, True):
            for size in case.sizes:
                for chance, rival in zip(case.chances, rivals, strict=True):
                    yield Setting(chance, rival, size, grouped)


def _measure(benchmark: IntervalBenchmark, number: int, setting: Setting) -> list[dict[str, Any]]:
    """Returns the rows of a case, whose samples depend on its number alone."""
    rng = np.random.default_rng([benchmark.seed, number])
    return measure_setting(benchmark, setting, rng)


def measure_setting(
    benchmark: IntervalBenchmark, setting: Setting, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Returns a row of the table for each metric."""
    case = benchmark.case
    ours: dict[str, list[Interval]] = {metric.name: [] for metric in _METRICS}
    percentiles: dict[str, list[Interval]] = {metric.name: [] for metric in _METRICS}
    for _ in range(benchmark.repeats):
        sample = draw_sample(case, setting, rng)
        groups = examples_by_group(sample.groups)
        first = score_answers(_METRICS, sample.targets, sample.answers)
        second = score_answers(_METRICS, sample.targets, sample.rival_answers)

        # The interval of a report, and the one of the bootstrap's percentiles.
        for metric in _METRICS:
            systems = [first] if setting.rival is None else [first, second]
            draws = _bootstrap(metric, systems, groups, rng)
            percentile = percentile_interval(draws)
            if setting.rival is None:
                interval = metric_interval(first, metric, groups, draws)
            else:
                interval = difference_interval(metric, first, second, groups, draws)
            ours[metric.name].append(interval or percentile)
            percentiles[metric.name].append(percentile)

    rows = []
    for metric in _METRICS:
        truth = true_score(metric, case, setting.chance)
        if setting.rival is not None:
            truth -= true_score(metric, case, setting.rival)
        rows.append(
            {
                "metric": metric.name,
                **setting._asdict(),
                "truth": truth,
                **_tally(ours[metric.name], truth)._asdict(),
                "percentile": _tally(percentiles[metric.name], truth)._asdict(),
            }
        )
    return rows


def draw_sample(case: IntervalCase, setting: Setting, rng: np.random.Generator) -> Sample:
    """Returns examples with the answers of two systems that agree in part."""
    group = np.arange(setting.size)
    if setting.grouped:
        sizes = rng.choice(case.group_sizes, size=setting.size)
        group = np.repeat(group, sizes)[: setting.size]

    # Examples of a group share a probability, drawn from a beta distribution around that of the
    # case.
    p = np.full(setting.size, setting.chance)
    if setting.grouped:
        spread = (1 - case.correlation) / case.correlation
        right = setting.chance * spread
        p = rng.beta(right, spread - right, size=setting.size)[group]
    is_right = rng.random(setting.size) < p

    # The rival is right or wrong with the first system, as far as its own chance allows, or alone.
    rival = setting.chance if setting.rival is None else setting.rival
    luck = rng.random(setting.size)
    copied = is_right & (luck < rival / setting.chance)
    if rival > setting.chance:
        copied = is_right | (luck < (rival - setting.chance) / (1 - setting.chance))
    alone = rng.random(setting.size) < rival
    is_copied = rng.random(setting.size) < case.agreement
    is_rival_right = np.where(is_copied, copied, alone)

    # A wrong answer is the other class.
    targets = (rng.random(setting.size) < case.share).astype(int)
    return Sample(
        groups=group.astype(str).tolist(),
        targets=targets.tolist(),
        answers=np.where(is_right, targets, 1 - targets).tolist(),
        rival_answers=np.where(is_rival_right, targets, 1 - targets).tolist(),
    )


def true_score(metric: Metric, case: IntervalCase, chance: float) -> float:
    """Returns the score of so many examples that chance is negligible."""
    if metric.additive is None:
        return 100 * chance
    terms = metric.additive.terms([1, 1, 0, 0], [1, 0, 0, 1])  # [4, P]
    share = np.asarray([case.share, case.share, 1 - case.share, 1 - case.share])
    probability = share * np.asarray([chance, 1 - chance, chance, 1 - chance])
    return float(metric.additive.score_of_sums(_POPULATION * probability @ terms))


def _bootstrap(
    metric: Metric,
    systems: Sequence[ScoredAnswers],
    groups: list[NDArray[np.int64]],
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """Returns <float64>[R] bootstrap draws over groups of a score, or of a difference of two."""
    sums = []
    score: ScoreOfSums | None = None
    for system in systems:
        additive = system.terms(metric)
        assert additive is not None, "these metrics are functions of sums"
        terms, score = additive
        sums.append(group_sums(terms, groups))
    assert score is not None

    # Groups alike are one row, drawn as often as any of them.
    side_by_side = np.concatenate(sums, axis=-1)  # [G, systems * P]
    rows, num_alike = np.unique(side_by_side, axis=0, return_counts=True)
    copies = rng.multinomial(len(groups), num_alike / len(groups), size=RESAMPLES)  # [R, U]
    drawn = np.split(copies.astype(np.float64) @ rows, len(systems), axis=-1)
    draws = score(drawn[0])
    if len(systems) == 2:
        draws = draws - score(drawn[1])
    return draws


def _tally(intervals: Sequence[Interval], truth: float) -> Tally:
    """Returns the coverage and the width of intervals."""
    ends = np.asarray(intervals)  # [N, 2]
    is_held = (ends[:, 0] <= truth + _ROUNDING) & (truth - _ROUNDING <= ends[:, 1])
    return Tally(
        coverage=100 * float(is_held.mean()), width=float((ends[:, 1] - ends[:, 0]).mean())
    )


def format_report(report: Mapping[str, Any]) -> str:
    """Returns the report as text: coverage by number of examples, percentiles in brackets."""
    sizes = list(dict.fromkeys(row["size"] for row in report["rows"]))
    header = ["metric", "examples", "chance", *(f"n = {size}" for size in sizes)]

    # A line for each metric, kind of example, and chance.
    lines: dict[tuple[str, str, str], dict[int, str]] = {}
    for row in report["rows"]:
        chance = f"{row['chance']:g}"
        if row["rival"] is not None:
            chance += f" - {row['rival']:g}"
        kind = "grouped" if row["grouped"] else "independent"
        cell = f"{row['coverage']:.1f} ({row['percentile']['coverage']:.1f})"
        lines.setdefault((row["metric"], kind, chance), {})[row["size"]] = cell
    cells = []
    for key, by_size in lines.items():
        cells.append([*key, *(by_size[size] for size in sizes)])

    return "\n".join(
        [
            f"Per cent of {report['repeats']:,} samples whose 95 % interval holds the true value; "
            "in brackets the percentile bootstrap.",
            "",
            format_table(header, cells),
            "",
            _verdict(report),
        ]
    )


def _verdict(report: Mapping[str, Any]) -> str:
    """Compares the worst cases with the required coverage."""
    ours = [row["coverage"] for row in report["rows"]]
    percentiles = [row["percentile"]["coverage"] for row in report["rows"]]
    num_below = sum(coverage < report["bar"] for coverage in ours)
    return (
        f"Lowest coverage {min(ours):.1f} % (percentile bootstrap {min(percentiles):.1f} %); "
        f"{num_below} of {len(ours)} cases below {report['bar']:.0f} %."
    )
