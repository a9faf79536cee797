"""Results of a study: differences of arms over seeds, with intervals and verdicts, in study.md."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from moe.errors import DataError
from moe.models.configuration import STMoEConfig
from moe.parsing import read_json_lines
from moe.training.metrics import METRICS_FILE
from stmoe_eval.reports.formatting import markdown_table
from stmoe_eval.studies.seeds import Difference, equivalence_p, holm, paired_difference
from stmoe_eval.studies.study import Contrast, Study, StudyRun

Verdict = Literal["holds", "does not hold at this scale", "not resolved"]

Numbers = Mapping[str, Mapping[int, float]]
"""The measured number of each complete run, by arm and seed."""

_LEVEL = 0.05


class ContrastResult(NamedTuple):
    """One comparison of two arms; positive differences favour the first arm.

    Attributes:
        contrast: The declared contrast.
        num_seeds: Number of seeds that both arms have.
        difference: Advantage of the first arm over the seeds; its p-value is corrected after Holm
            unless the comparison is the primary one.
        equivalence_p: p-value of TOST: that the difference lies outside the margin; NaN if the
            seeds show no spread.
    """

    contrast: Contrast
    num_seeds: int
    difference: Difference
    equivalence_p: float

    @property
    def verdict(self) -> Verdict:
        """Conclusion about the claim.

        A claim of a difference holds when that is significant and of the claimed sign. It does not
        hold when the difference is significant the other way, or shown to be within the margin. A
        claim of equality is the other way round.
        """
        is_different = self.difference.p < _LEVEL
        is_equal = self.equivalence_p < _LEVEL
        expect = self.contrast.expect
        has_claimed_sign = (self.difference.mean > 0) == (expect == "better")
        if is_equal if expect == "equal" else is_different and has_claimed_sign:
            return "holds"
        return "does not hold at this scale" if is_different or is_equal else "not resolved"


def read_numbers(study: Study, runs: Sequence[StudyRun]) -> dict[str, dict[int, float]]:
    """Returns the last value of the metric in each complete run, by arm and seed.

    Raises:
        DataError: When a run has no such metric.
    """
    numbers: dict[str, dict[int, float]] = {arm: {} for arm in study.arms}
    metric = study.measure.metric
    for run in runs:
        if not run.is_complete:
            continue
        path = run.folder / METRICS_FILE
        values = [line[metric] for _, line in read_json_lines(path) if metric in line]
        if not values:
            raise DataError(f"{path} holds no {metric!r}. Choose another measure.metric.")
        numbers[run.arm][run.seed] = values[-1]
    return numbers


def contrast_results(study: Study, numbers: Numbers) -> list[ContrastResult]:
    """Returns the primary comparison and the secondary ones, whose p-values Holm corrects.

    A comparison of arms that share no seed yet is left out.
    """
    sign = -1 if study.measure.better == "lower" else 1
    results = []
    for contrast in (study.primary, *study.contrasts):
        first = numbers[contrast.arm]
        second = numbers[contrast.against]
        seeds = sorted(first.keys() & second.keys())
        if not seeds:
            continue
        arm = [sign * first[seed] for seed in seeds]
        against = [sign * second[seed] for seed in seeds]
        difference = paired_difference(arm, against)
        equal = equivalence_p(arm, against, contrast.margin)
        results.append(ContrastResult(contrast, len(seeds), difference, equal))

    # The primary one was declared; the others are a family.
    family = []
    for number, result in enumerate(results):
        if result.contrast is not study.primary and not math.isnan(result.difference.p):
            family.append(number)
    corrected = holm([results[number].difference.p for number in family])
    for number, p in zip(family, corrected, strict=True):
        difference = results[number].difference._replace(p=p)
        results[number] = results[number]._replace(difference=difference)
    return results


def study_markdown(study: Study, runs: Sequence[StudyRun], numbers: Numbers, command: str) -> str:
    """Returns the claim, the comparisons and the numbers of all runs as Markdown."""
    unit = f" ({study.measure.unit})" if study.measure.unit else ""
    header = ["comparison", "expected", f"margin{unit}", "seeds", f"better by{unit}"]
    header += ["p", "p (equal)", "verdict"]
    rows = []
    for result in contrast_results(study, numbers):
        arm, against, expect, margin = result.contrast
        primary = " (primary)" if result.contrast is study.primary else ""
        cells = [f"{arm} vs. {against}{primary}", expect, f"{margin:g}", str(result.num_seeds)]
        p_values = [f"{result.difference.p:.2g}", f"{result.equivalence_p:.2g}"]
        rows.append([*cells, f"{result.difference:+.4g}", *p_values, result.verdict])

    missing = [run.name for run in runs if not run.is_complete]
    lines = [f"# {study.title}", "", f"**Claim.** {study.claim}", ""]
    lines += [f"**The paper.** {study.paper}", ""]
    lines += [f"**Expected**, before the first run. {study.expected}", ""]
    lines += [*markdown_table(header, rows), ""]
    lines += [
        "Differences are means over seeds, with paired Student's t intervals; p-values of all but the primary "
        "comparison are Holm-corrected; p (equal): two one-sided tests for a difference within the margin. A "
        f"{study.measure.better} {study.measure.metric} is better.",
        "",
        *markdown_table(["arm", "mean", "each seed", "parameters", "active"], _arms(runs, numbers)),
        "",
    ]
    if missing:
        lines += [f"Missing runs ({len(missing)}): {'; '.join(missing)}.", ""]
    return "\n".join([*lines, "```bash", command, "```", ""])


def _arms(runs: Sequence[StudyRun], numbers: Numbers) -> list[list[str]]:
    """Returns a row for each arm that has a complete run."""
    folders: dict[str, Path] = {}
    for run in runs:
        if run.is_complete:
            folders[run.arm] = run.folder / "model"

    rows = []
    for arm, folder in folders.items():
        values = list(numbers[arm].values())
        config = STMoEConfig.from_pretrained(folder)
        sizes = (config.num_parameters(), config.num_active_parameters())
        each = ", ".join(f"{value:.4g}" for value in values)
        rows.append([arm, f"{statistics.fmean(values):.4g}", each, *(f"{n:,}" for n in sizes)])
    return rows
