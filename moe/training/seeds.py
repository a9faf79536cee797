"""One recipe with several seeds: a folder for each run, and a summary of their scores.

The summary is written as summary.json and as summary.md.
"""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from moe.checkpoint.best_model import BEST_FOLDER, DevScores, best_and_last
from moe.checks import check
from moe.files import claim_folder, write_text
from moe.training.recipe import Recipe

R = TypeVar("R", bound=Recipe)

JOB = "job"
"""Kind of a folder of several runs."""

NOTE = (
    "The paper reports the peak: the best of all evaluations. It is chosen on the dev split that it is reported on, "
    "which is optimistic; the last model is not chosen at all."
)


def seed_runs(recipe: R, seeds: Sequence[int] | None, out: Path) -> list[tuple[R, Path]]:
    """Returns the recipe and folder of each run: `out` itself without seeds, else out/seed-N.

    Raises:
        ConfigError: When a seed is repeated or out of range, or the list is empty.
    """
    if seeds is None:
        return [(recipe, out)]
    differ = bool(seeds) and len(set(seeds)) == len(seeds)
    check(differ, "seeds", list(seeds), "one or more different numbers, one for each run")
    return [(dataclasses.replace(recipe, seed=seed), out / f"seed-{seed}") for seed in seeds]


def claim_job(folder: Path) -> None:
    """Makes and marks the folder of several runs, each of which has its own folder.

    Raises:
        DataError: When the folder holds something else.
    """
    in_use = f"Another job begins in {folder}. Wait for it, or choose another --out."
    with claim_folder(folder, JOB, in_use=in_use):
        pass


def write_summary(out: Path, runs: Sequence[tuple[Recipe, Path]]) -> str:
    """Writes the scores of finished runs to summary.json and summary.md, and returns the latter.

    Args:
        out: Folder of both files.
        runs: Recipe and folder of each run.
    """
    scores = {folder: best_and_last(folder) for _, folder in runs}
    entries: list[dict[str, Any]] = []
    for recipe, folder in runs:
        best, last = scores[folder]
        models = {"best": str(folder / BEST_FOLDER / "model"), "last": str(folder / "model")}
        entries.append({"seed": recipe.seed, "best": best, "last": last, "models": models})
    best_spreads = _spread_by_name([best for best, _ in scores.values()])
    last_spreads = _spread_by_name([last for _, last in scores.values()])
    content = {"note": NOTE, "runs": entries, "best": best_spreads, "last": last_spreads}

    # Scores of all runs together, then each run by itself.
    seeds = ", ".join(str(entry["seed"]) for entry in entries)
    lines = [f"Dev scores, mean ± standard deviation over seeds {seeds}.", "", NOTE, ""]
    lines += ["| score | best model | last model |", "|---|---|---|"]
    for name, best_spread in best_spreads.items():
        lines.append(f"| {name} | {_cell(best_spread)} | {_cell(last_spreads[name])} |")
    lines += ["", "| seed | best, step | mean | last, step | mean | models |", "|---" * 6 + "|"]
    for entry in entries:
        cells = [entry["seed"]]
        for model in ("best", "last"):
            cells += [entry[model]["step"], f"{entry[model]['mean']:.2f}"]
        cells.append(f"{entry['models']['best']}, {entry['models']['last']}")
        lines.append(f"| {' | '.join(map(str, cells))} |")

    text = "\n".join(lines) + "\n"
    write_text(out / "summary.json", json.dumps(content, indent=1) + "\n")
    write_text(out / "summary.md", text)
    return text


def _spread_by_name(runs: Sequence[DevScores]) -> dict[str, dict[str, float | None]]:
    """Returns the mean of each score over the runs and, of several, its standard deviation."""
    spreads = {}
    for name in runs[0]:
        if name == "step":
            continue
        values = [run[name] for run in runs]
        stdev = statistics.stdev(values) if len(values) > 1 else None
        spreads[name] = {"mean": statistics.fmean(values), "stdev": stdev}
    return spreads


def _cell(spread: dict[str, float | None]) -> str:
    """Returns a mean, with its standard deviation where there is one, as text."""
    deviation = "" if spread["stdev"] is None else f" ± {spread['stdev']:.2f}"
    return f"{spread['mean']:.2f}{deviation}"
