"""The peak of a run: dev scores at every evaluation, and the model with the best of them beside the
last.

What is scored is the saved model: it is written to a folder, read back by the evaluation, on
whatever ranks, and either kept as the best or removed. Scores are kept by step: a run that was
killed and takes the same steps again reads them.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe.checks import is_kind, shown
from moe.distributed.collectives import broadcast_from_rank_zero
from moe.errors import DataError
from moe.files import remove_folder, whole_folder, write_text
from moe.parsing import read_json, to_record

DEV_FOLDER, BEST_FOLDER, SCORES_FILE = "dev", "best", "scores.json"

DevEvaluation = Callable[[Path, Path], dict[str, float]]
"""(folder of a model, folder for its answers) to scores in 0..100 by `TASK/METRIC`, and their `mean`; on every rank."""


def score_model(
    folder: Path, step: int, export: Callable[[Path], None], evaluate: DevEvaluation
) -> dict[str, float]:
    """Returns the dev scores of the model after `step` updates; every rank must call it.

    The first model of the highest mean so far stays in best/model, its scores in best/scores.json.

    Args:
        folder: Of the run.
        step: Updates behind the model.
        export: Writes the model to a folder; called by every rank, or none.
        evaluate: Scores it; not called again for a step whose scores are there.
    """
    candidate = folder / DEV_FOLDER / "model"
    scores_file = _scores_file(folder, step)

    # What a killed run has left of a model would be mixed with the next.
    broadcast_from_rank_zero(lambda: _remove(candidate))
    known = broadcast_from_rank_zero(lambda: _read(scores_file, step))
    if known is None:
        export(candidate)
    scores = known or {"step": step, **evaluate(candidate, scores_file.parent)}
    broadcast_from_rank_zero(lambda: _write(scores_file, scores))

    if broadcast_from_rank_zero(lambda: _is_best(folder, scores)):
        if known is not None:  # the run was killed before this model became the best
            export(candidate)
        broadcast_from_rank_zero(lambda: _promote(folder, scores))
    broadcast_from_rank_zero(lambda: _remove(candidate))
    return {name: value for name, value in scores.items() if name != "step"}


def forget_scores(folder: Path) -> None:
    """Removes the scores of a run that begins at its first step: they are of other settings, or
    will be found again.

    Answers stay: each file of them says which model gave them.
    """
    for path in (folder / DEV_FOLDER).glob(f"step_*/{SCORES_FILE}"):
        path.unlink()
    _remove(folder / BEST_FOLDER)


def best_and_last(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the scores of the best model of a run and of its last, each with its `step`.

    Raises:
        DataError: When there are none, or a file of them is damaged.
    """
    scores = []
    for path in sorted((folder / DEV_FOLDER).glob(f"step_*/{SCORES_FILE}")):
        if (scores_of_step := _read(path)) is not None:
            scores.append(scores_of_step)
    if not scores:
        raise DataError(
            f"{folder / DEV_FOLDER} holds no {SCORES_FILE}, so there is no summary of this run. Restore the folder, or "
            "train again with another --out."
        )
    return max(scores, key=lambda scores_of_step: scores_of_step["mean"]), scores[-1]


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


def _read(path: Path, step: int | None = None) -> dict[str, Any] | None:
    """Returns what a file of scores says; None when there is none.

    Args:
        path: The file.
        step: Updates behind the model that it must be of; None for any.

    Raises:
        DataError: When it is damaged, or of another step.
    """
    if not path.exists():
        return None
    advice = "Remove the file: --resume then scores that model again."
    if step is None:
        advice = "Restore the file from a copy."
    content = read_json(path, advice=advice, nan=True)
    scores = to_record(dict[str, float], content, where=str(path), advice=advice)

    for name in ("step", "mean"):
        if name not in scores:
            raise DataError(f"{path}: {name} is missing. {advice}")
    scores_step = content["step"]
    if not is_kind(scores_step, int) or scores_step < 0 or step not in (None, scores_step):
        expected = "a number of updates" if step is None else f"{step}, as its folder"
        raise DataError(f"{path}: step is {shown(scores_step)}; expected {expected}. {advice}")
    return content


def _remove(folder: Path) -> None:
    """Removes a folder of a model, if there is one."""
    if folder.is_dir():
        remove_folder(folder)


def _write(path: Path, scores: dict[str, Any]) -> None:
    """Writes a file of scores, whole."""
    write_text(path, json.dumps(scores, indent=1) + "\n")
