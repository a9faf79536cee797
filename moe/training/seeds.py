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
from moe.errors import ConfigError
from moe.files import write_text
from moe.training.recipe import Recipe

R = TypeVar("R", bound=Recipe)

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
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(
            f"seeds is {list(seeds)}; expected one or more different numbers, one for each run."
        )
    return [(dataclasses.replace(recipe, seed=seed), out / f"seed-{seed}") for seed in seeds]


def write_summary(out: Path, runs: Sequence[tuple[Recipe, Path]]) -> str:
    """Writes the scores of finished runs to summary.json and summary.md, and returns the latter.

    Args:
        out: Folder of both files.
        runs: Recipe and folder of each run.
    """
    scores = [best_and_last(folder) for _, folder in runs]
    entries = []
    for (recipe, folder), (best, last) in zip(runs, scores, strict=True):
        models = {"best": str(folder / BEST_FOLDER / "model"), "last": str(folder / "model")}
        entries.append(
            {"seed": recipe.seed, "best": best.to_json(), "last": last.to_json(), "models": models}
        )

    content = {
        "note": NOTE,
        "runs": entries,
        "best": _spread_by_name([best for best, _ in scores]),
        "last": _spread_by_name([last for _, last in scores]),
    }
    text = _markdown(content)
    write_text(out / "summary.json", json.dumps(content, indent=1) + "\n")
    write_text(out / "summary.md", text)
    return text


def _spread_by_name(runs: Sequence[DevScores]) -> dict[str, dict[str, float | None]]:
    """Returns the mean of each score over the runs and, of several, its standard deviation."""
    spreads = {}
    for name in runs[0].scores:
        values = [run.scores[name] for run in runs]
        stdev = statistics.stdev(values) if len(values) > 1 else None
        spreads[name] = {"mean": statistics.fmean(values), "stdev": stdev}
    return spreads


def _markdown(content: dict[str, Any]) -> str:
    """Returns the summary as Markdown: a table of scores, and one of runs."""
    runs = content["runs"]
    seeds = f"seed {runs[0]['seed']}"
    if len(runs) > 1:
        numbers = ", ".join(str(run["seed"]) for run in runs)
        seeds = f"mean and standard deviation over seeds {numbers}"

    # Scores of all runs together.
    lines = [f"Dev scores, {seeds}.", "", NOTE, ""]
    lines += ["| score | best model | last model |", "|---|---|---|"]
    for name in content["best"]:
        best, last = (_spread_cell(content[model][name]) for model in ("best", "last"))
        lines.append(f"| {name} | {best} | {last} |")

    # Each run by itself.
    lines += ["", "| seed | best, step | mean | last, step | mean | models |", "|---" * 6 + "|"]
    for run in runs:
        cells = [str(run["seed"])]
        for model in ("best", "last"):
            cells += [str(run[model]["step"]), f"{run[model]['mean']:.2f}"]
        cells.append(f"{run['models']['best']}, {run['models']['last']}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spread_cell(spread: dict[str, float | None]) -> str:
    """Returns a mean, with its standard deviation where there is one, as text."""
    deviation = "" if spread["stdev"] is None else f" ± {spread['stdev']:.2f}"
    return f"{spread['mean']:.2f}{deviation}"
