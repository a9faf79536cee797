"""The best model of a run: dev scores at every evaluation, and the model with the best mean.

The saved model is scored: it is written to a folder, read back by the evaluation on any ranks, and
either kept as the best or removed. Scores are stored by step: a run that was killed and repeats its
steps reads them.
"""

import json
import math
from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path

from moe.distributed.collectives import broadcast_from_rank_zero
from moe.errors import DataError
from moe.files import register_folder_kind, remove_folder, whole_folder, write_text
from moe.parsing import read_json, to_record

DEV_FOLDER = "dev"
BEST_FOLDER = "best"
SCORES_FILE = "scores.json"
BEST_MODEL = register_folder_kind("best model", markers=[SCORES_FILE], parts=[SCORES_FILE, "model"])

DevEvaluation = Callable[[Path, Path], dict[str, float]]
"""Maps (folder of a model, folder for its answers) to scores in 0..100 by `TASK/METRIC`, and their `mean`."""


DevScores = Mapping[str, float]
"""Content of scores.json: scores in 0..100 of a model by `TASK/METRIC`, their `mean`, and the `step` of the model."""


def format_scores(scores: DevScores) -> str:
    """Returns e.g. `pairs/exact_match 61.3, pairs/f1 70.2`; with several tasks their mean, too."""
    tasks = {name.partition("/")[0] for name in scores if "/" in name}
    left_out = {"step"} if len(tasks) > 1 else {"step", "mean"}
    return ", ".join(
        f"{name} {score:.1f}" for name, score in scores.items() if name not in left_out
    )


def score_model(
    folder: Path, step: int, export: Callable[[Path], None], evaluate: DevEvaluation
) -> dict[str, float]:
    """Returns the dev scores of the model after `step` updates; every rank must call it.

    The first model of the highest mean so far stays in best/model, its scores in best/scores.json.

    Args:
        folder: Folder of the run.
        step: Number of updates of the model.
        export: Writes the model to a folder; called by every rank, or none.
        evaluate: Scores it; not called again for a step that has scores.
    """
    candidate = folder / DEV_FOLDER / "model"
    scores_file = folder / DEV_FOLDER / f"step_{step:08d}" / SCORES_FILE

    # Leftovers of a model from a killed run would be mixed with the next.
    broadcast_from_rank_zero(lambda: _remove_model(candidate))

    # A step is scored only once.
    scores = broadcast_from_rank_zero(lambda: _read_scores(scores_file))
    was_scored = scores is not None
    if scores is None:
        export(candidate)
        scores = {"step": step, **evaluate(candidate, scores_file.parent)}
        broadcast_from_rank_zero(lambda: _write_scores(scores_file, scores))

    if broadcast_from_rank_zero(lambda: _is_best(folder, scores)):
        # A run that was killed before its scored model became the best no longer has the model.
        if was_scored:
            export(candidate)
        broadcast_from_rank_zero(lambda: _promote(folder, scores))

    broadcast_from_rank_zero(lambda: _remove_model(candidate))
    return {name: score for name, score in scores.items() if name != "step"}


def remove_scores(folder: Path) -> None:
    """Removes scores and best model of a run that starts at its first step.

    They belong to other settings, or will be recomputed. Answers are kept: each file names its
    model.
    """
    for path in (folder / DEV_FOLDER).glob(f"step_*/{SCORES_FILE}"):
        path.unlink()
    _remove_model(folder / BEST_FOLDER)


def best_and_last(folder: Path) -> tuple[DevScores, DevScores]:
    """Returns the scores of the best model of a run and of its last.

    Raises:
        DataError: When there are none, or a file of them is damaged.
    """
    paths = sorted((folder / DEV_FOLDER).glob(f"step_*/{SCORES_FILE}"))
    scores_by_step = [scores for path in paths if (scores := _read_scores(path)) is not None]
    if not scores_by_step:
        raise DataError(
            f"{folder / DEV_FOLDER} holds no {SCORES_FILE}, so there is no summary of this run. Restore the folder, or "
            "train again with another --out."
        )
    # Ties go to the first, as in `score_model`.
    best = max(scores_by_step, key=itemgetter("mean"))
    return best, scores_by_step[-1]


def _is_best(folder: Path, scores: DevScores) -> bool:
    """Returns whether no earlier model has so high a mean."""
    best = _read_scores(folder / BEST_FOLDER / SCORES_FILE)
    return best is None or scores["mean"] > best["mean"] or math.isnan(best["mean"])


def _promote(folder: Path, scores: DevScores) -> None:
    """Makes the candidate the best model."""
    with whole_folder(folder / BEST_FOLDER, kind=BEST_MODEL) as partial:
        (folder / DEV_FOLDER / "model").rename(partial / "model")
        _write_scores(partial / SCORES_FILE, scores)


def _read_scores(path: Path) -> dict[str, float] | None:
    """Returns the content of a file of scores; None when there is none.

    Raises:
        DataError: When it is damaged.
    """
    if not path.exists():
        return None
    advice = "Remove the file: --resume then scores that model again."
    scores = read_json(path, advice=advice)
    to_record(dict[str, float], scores, where=str(path), advice=advice)
    if not {"mean", "step"} <= scores.keys():
        raise DataError(f"{path} holds no scores of a step with their mean. {advice}")
    return scores


def _write_scores(path: Path, scores: DevScores) -> None:
    write_text(path, json.dumps(scores, indent=1) + "\n")


def _remove_model(folder: Path) -> None:
    """Removes a folder of a model, if there is one."""
    if folder.is_dir():
        remove_folder(folder)
