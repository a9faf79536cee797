"""The peak of a run: dev scores at every evaluation, and the model with the best of them beside the last.

What is scored is the saved model: it is written to a folder, read back by the evaluation, on whatever ranks, and either
kept as the best or removed. Scores are kept by step: a run that was killed and takes the same steps again reads them.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe.distributed.exchange import from_first_rank
from moe.files import whole_file, whole_folder

DEV_FOLDER, BEST_FOLDER, SCORES_FILE = "dev", "best", "scores.json"

DevEvaluation = Callable[[Path, Path], dict[str, float]]
"""(folder of a model, folder for its answers) to scores in 0..100 by `TASK/METRIC`, and their `mean`; on every rank."""


def score_model(folder: Path, step: int, export: Callable[[Path], None], evaluate: DevEvaluation) -> dict[str, float]:
    """Returns the dev scores of the model after `step` updates; every rank must call it.

    The first model of the highest mean so far stays in best/model, its scores in best/scores.json.

    Args:
        folder: Of the run.
        step: Updates behind the model.
        export: Writes the model to a folder; called by every rank, or none.
        evaluate: Scores it; not called again for a step whose scores are there.
    """
    candidate, scores_file = folder / DEV_FOLDER / "model", _scores_file(folder, step)
    known = from_first_rank(lambda: _read(scores_file))
    if known is None:
        export(candidate)
    scores = known or {"step": step, **evaluate(candidate, scores_file.parent)}
    from_first_rank(lambda: _write(scores_file, scores))
    if from_first_rank(lambda: _is_best(folder, scores)):
        if known is not None:  # the run was killed before this model became the best
            export(candidate)
        from_first_rank(lambda: _promote(folder, scores))
    from_first_rank(lambda: shutil.rmtree(candidate, ignore_errors=True))
    return {name: value for name, value in scores.items() if name != "step"}


def forget_scores(folder: Path) -> None:
    """Removes the scores of a run that begins at its first step: they are of other settings, or will be found again.

    Answers stay: each file of them says which model gave them.
    """
    for path in (folder / DEV_FOLDER).glob(f"step_*/{SCORES_FILE}"):
        path.unlink()
    shutil.rmtree(folder / BEST_FOLDER, ignore_errors=True)


def best_and_last(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the scores of the best model of a run and of its last, each with its `step`."""
    found = [_read(path) for path in sorted((folder / DEV_FOLDER).glob(f"step_*/{SCORES_FILE}"))]
    scores = [one for one in found if one is not None]
    return max(scores, key=lambda one: one["mean"]), scores[-1]


def _is_best(folder: Path, scores: dict[str, Any]) -> bool:
    """Returns whether no model before has so high a mean."""
    best = _read(folder / BEST_FOLDER / SCORES_FILE)
    return best is None or scores["mean"] > best["mean"] or math.isnan(best["mean"])


def _promote(folder: Path, scores: dict[str, Any]) -> None:
    """Makes the candidate the best model."""
    with whole_folder(folder / BEST_FOLDER, kind="best model") as partial:
        (folder / DEV_FOLDER / "model").rename(partial / "model")
        _write(partial / SCORES_FILE, scores)


def _scores_file(folder: Path, step: int) -> Path:
    """Returns where the scores after `step` updates are."""
    return folder / DEV_FOLDER / f"step_{step:08d}" / SCORES_FILE


def _read(path: Path) -> dict[str, Any] | None:
    """Returns what a file of scores says; None when there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _write(path: Path, scores: dict[str, Any]) -> None:
    """Writes a file of scores, whole."""
    with whole_file(path) as partial:
        partial.write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")
