"""One recipe with several seeds: a folder for each run, and their scores in summary.json and
summary.md.
"""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from moe.checkpoint.best_model import BEST_FOLDER, best_and_last
from moe.errors import ConfigError
from moe.files import write_text
from moe.training.recipe import Recipe

R = TypeVar("R", bound=Recipe)

SUMMARY = "summary"
NOTE = (
    "The paper reports the peak: the best of all evaluations. It is chosen on the dev split that it is reported on, "
    "which is optimistic; the last model is not chosen at all."
)


def seed_runs(recipe: R, seeds: Sequence[int] | None, out: Path) -> list[tuple[R, Path]]:
    """Returns the recipe and the folder of each run: `out` itself when there are no seeds, else
    out/seed-N.

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
    """Writes the scores of finished runs to summary.json and summary.md in `out`, and returns the
    latter's text.
    """
    found = []
    for recipe, folder in runs:
        best, last = best_and_last(folder)
        models = {"best": f"{folder / BEST_FOLDER / 'model'}", "last": f"{folder / 'model'}"}
        found.append({"seed": recipe.seed, "best": best, "last": last, "models": models})
    summary: dict[str, Any] = {"note": NOTE, "runs": found}
    for which in ("best", "last"):
        names = [name for name in found[0][which] if name != "step"]
        summary[which] = {name: _spread([run[which][name] for run in found]) for name in names}
    text = _in_words(summary)
    write_text(out / f"{SUMMARY}.json", json.dumps(summary, indent=1) + "\n")
    write_text(out / f"{SUMMARY}.md", text)
    return text


def _spread(values: list[float]) -> dict[str, float | None]:
    """Returns the mean of a score over the seeds and its standard deviation, None for a single one."""
    return {
        "mean": statistics.fmean(values),
        "stdev": statistics.stdev(values) if len(values) > 1 else None,
    }


def _in_words(summary: dict[str, Any]) -> str:
    """Returns the summary as Markdown."""
    runs = summary["runs"]
    over = f"mean and standard deviation over seeds {', '.join(str(run['seed']) for run in runs)}"
    lines = [
        f"Dev scores, {over if len(runs) > 1 else 'seed ' + str(runs[0]['seed'])}.",
        "",
        NOTE,
        "",
    ]
    lines += ["| score | best model | last model |", "|---|---|---|"]
    for name, best in summary["best"].items():
        lines.append(f"| {name} | {_number(best)} | {_number(summary['last'][name])} |")
    lines += [
        "",
        "| seed | best, step | mean | last, step | mean | models |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        cells = [f"{run[which]['step']} | {run[which]['mean']:.2f}" for which in ("best", "last")]
        lines.append(
            f"| {run['seed']} | {' | '.join(cells)} | {run['models']['best']}, {run['models']['last']} |"
        )
    return "\n".join(lines) + "\n"


def _number(spread: dict[str, float | None]) -> str:
    """Returns a score with its spread."""
    deviation = "" if spread["stdev"] is None else f" ± {spread['stdev']:.2f}"
    return f"{spread['mean']:.2f}{deviation}"
