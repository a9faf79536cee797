"""Several runs in one folder, one after the other: a job of stages."""

import json
from collections.abc import Sequence
from pathlib import Path

from moe.errors import DataError
from moe.files import whole_file
from moe.parsing import read_json, read_json_lines
from moe.training.metrics import METRICS_FILE


def keep_settings(folder: Path, settings: dict[str, str], resume: bool) -> None:
    """Writes the settings of a new job, or checks that a resumed one has the same.

    Args:
        folder: Of the job.
        settings: By name.
        resume: Whether the user asked to go on.

    Raises:
        DataError: When the folder holds a job, and it is not resumed or has other settings.
    """
    path = folder / "settings.json"
    if not path.exists():
        with whole_file(path) as partial:
            partial.write_text(json.dumps(settings), encoding="utf-8")
    elif not resume or read_json(path) != settings:
        why = "with other settings" if resume else "already"
        raise DataError(f"{folder} holds a run {why}. Give --resume and the same settings, or another --out.")


def merge_metrics(folder: Path, stages: Sequence[str]) -> None:
    """Writes the metrics of the runs in the folders `stages` to one metrics.jsonl, each line with its stage."""
    with whole_file(folder / METRICS_FILE) as partial, partial.open("w", encoding="utf-8") as file:
        for stage in stages:
            for _, line in read_json_lines(folder / stage / METRICS_FILE, torn_end=True, nan=True):
                file.write(json.dumps({"stage": stage, **line}) + "\n")
