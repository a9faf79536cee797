"""One recipe with several seeds: a folder for each run, and a summary of their scores.

The summary is written as summary.json and as summary.md.
"""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from moe.checkpoint.best_model import BEST_FOLDER, DevScores, best_and_last
from moe.errors import ConfigError
from moe.files import write_text
from moe.training.recipe import Recipe

R = TypeVar("R", bound=Recipe)

SUMMARY = "summary"
NOTE = (
    "The paper reports the peak: the best of all evaluations. It is chosen on the dev split that it is reported on, "
    "which is optimistic; the last model is not chosen at all."
)


@dataclass(frozen=True)
class SeedScores:
    """The dev scores of one run.

    Attributes:
        seed: Seed of the run.
        best: Scores of the best of its models.
        last: Scores of its last model.
        best_model: Folder of the best model.
        last_model: Folder of the last model.
    """

    seed: int
    best: DevScores
    last: DevScores
    best_model: str
    last_model: str


@dataclass(frozen=True)
class SeedSpread:
    """A score over several seeds.

    Attributes:
        mean: Mean over the seeds.
        stdev: Standard deviation over the seeds; None for a single one.
    """

    mean: float
    stdev: float | None

    def __str__(self) -> str:
        deviation = "" if self.stdev is None else f" ± {self.stdev:.2f}"
        return f"{self.mean:.2f}{deviation}"


def seed_runs(recipe: R, seeds: Sequence[int] | None, out: Path) -> list[tuple[R, Path]]:
    """Returns recipe and folder of each run: `out` itself without seeds, else out/seed-N.

    Raises:
        ConfigError: When a seed is repeated or out of range, or there is an empty list of them.
    """
    if seeds is None:
        return [(recipe, out)]
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(
            f"seeds is {list(seeds)}; expected one or more different numbers, one for each run."
        )
    return [(dataclasses.replace(recipe, seed=seed), out / f"seed-{seed}") for seed in seeds]


def write_summary(out: Path, runs: Sequence[tuple[Recipe, Path]]) -> str:
    """Writes the scores of finished runs to summary.json and summary.md, and returns the latter.

    Args:
        out: Folder that receives both files.
        runs: Recipe and folder of each run.
    """
    scores = [_read_scores(recipe, folder) for recipe, folder in runs]
    best = _spread_by_name([run.best for run in scores])
    last = _spread_by_name([run.last for run in scores])

    # The fields of a spread are the names in the file.
    content = {"note": NOTE, "runs": list(map(_run_entry, scores)), "best": best, "last": last}
    text = _markdown(scores, best, last)
    json_text = json.dumps(content, indent=1, default=dataclasses.asdict)
    write_text(out / f"{SUMMARY}.json", json_text + "\n")
    write_text(out / f"{SUMMARY}.md", text)
    return text


def _read_scores(recipe: Recipe, folder: Path) -> SeedScores:
    best, last = best_and_last(folder)
    return SeedScores(
        seed=recipe.seed,
        best=best,
        last=last,
        best_model=str(folder / BEST_FOLDER / "model"),
        last_model=str(folder / "model"),
    )


def _spread_by_name(runs: Sequence[DevScores]) -> dict[str, SeedSpread]:
    """Returns the mean and deviation over the runs of each score, by its name."""
    spreads = {}
    for name in runs[0].scores:
        values = [run.scores[name] for run in runs]
        stdev = statistics.stdev(values) if len(values) > 1 else None
        spreads[name] = SeedSpread(statistics.fmean(values), stdev)
    return spreads


def _run_entry(run: SeedScores) -> dict[str, Any]:
    """Returns one run as it stands in summary.json."""
    return {
        "seed": run.seed,
        "best": run.best.to_json(),
        "last": run.last.to_json(),
        "models": {"best": run.best_model, "last": run.last_model},
    }


def _markdown(
    runs: Sequence[SeedScores], best: dict[str, SeedSpread], last: dict[str, SeedSpread]
) -> str:
    """Returns the summary as Markdown: a table of scores, and one of runs."""
    seeds = f"seed {runs[0].seed}"
    if len(runs) > 1:
        numbers = ", ".join(str(run.seed) for run in runs)
        seeds = f"mean and standard deviation over seeds {numbers}"

    # Scores of all runs together.
    lines = [f"Dev scores, {seeds}.", "", NOTE, ""]
    lines += ["| score | best model | last model |", "|---|---|---|"]
    for name, spread in best.items():
        lines.append(f"| {name} | {spread} | {last[name]} |")

    # Each run by itself.
    lines += ["", "| seed | best, step | mean | last, step | mean | models |", "|---" * 6 + "|"]
    for run in runs:
        best_cells = f"{run.best.step} | {run.best.mean:.2f}"
        last_cells = f"{run.last.step} | {run.last.mean:.2f}"
        models = f"{run.best_model}, {run.last_model}"
        lines.append(f"| {run.seed} | {best_cells} | {last_cells} | {models} |")
    return "\n".join(lines) + "\n"
