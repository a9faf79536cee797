"""The files of a report: report.json for programs, report.md and report.html for people, card.md
for a model card, timing.json for values that differ between runs.

An earlier report with results that the new one lacks is kept as a copy.
"""

import json
import platform
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from moe.checks import is_kind
from moe.errors import CheckpointError
from moe.files import write_text
from moe.kernels.product_choice import processor_name
from moe.models.configuration import STMoEConfig
from moe.parsing import printable, read_json, to_json, to_record
from stmoe_eval.answers.cost import TIMING
from stmoe_eval.answers.inference import AS_SAVED, describe_capacity
from stmoe_eval.answers.sealed_json import seal
from stmoe_eval.answers.seq2seq import Seq2Seq
from stmoe_eval.reports.card import model_card
from stmoe_eval.reports.html_report import html_report
from stmoe_eval.reports.markdown_report import markdown_report
from stmoe_eval.reports.records import ModelInfo, Report, Selection
from stmoe_eval.reports.run_folder import (
    REPORT,
    is_superseded,
    keep_earlier_report,
    remove_earlier_report,
    results_of_report,
)
from stmoe_eval.reports.scoreboard import build_scoreboard

_LIBRARIES = (
    "stmoe",
    "torch",
    "transformers",
    "datasets",
    "numpy",
    "scipy",
    "scikit-learn",
    "rouge-score",
)


def library_versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that compute the numbers."""
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # run from a source tree that is not installed
            continue
    return versions


def device_name() -> str:
    """Returns the name of the device that models run on."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return processor_name()


def model_info(folder: Path, system: Seq2Seq) -> ModelInfo:
    """Returns the report's information on a checkpoint.

    Raises:
        CheckpointError: When its dev scores are damaged.
    """
    # Models of this library know how many of their experts a token uses.
    config = system.model.config
    if isinstance(config, STMoEConfig):
        parameters = config.num_parameters()
        active_parameters = config.num_active_parameters()
    else:
        parameters = system.model.num_parameters()
        active_parameters = parameters

    # A run keeps its last checkpoint in RUN/model.
    run = folder.absolute().parent
    return ModelInfo(
        folder=str(folder),
        fingerprint=system.fingerprint,
        class_name=type(system.model).__name__,
        parameters=parameters,
        active_parameters=active_parameters,
        chosen_by=_read_selection(run),
        last_of_run=folder.name == "model" and (run / "recipe.yaml").is_file(),
        dtype=str(system.model.dtype).removeprefix("torch."),
        capacity=describe_capacity(config),
        inference=None if system.inference == AS_SAVED else system.inference,
    )


def _read_selection(run: Path) -> Selection | None:
    """Returns how a fine-tuning chose its best checkpoint, which it keeps in best/model.

    Args:
        run: The folder that holds the checkpoint.
    """
    path = run / "scores.json"
    if not path.is_file():
        return None

    advice = (
        "Restore it, or remove it: the report then says nothing of how the checkpoint was chosen."
    )

    # The dev scores used to choose the checkpoint are in the same folder.
    content = read_json(path, advice=advice, error=CheckpointError, nan=True)
    scores = to_record(
        dict[str, int | float], content, where=str(path), advice=advice, error=CheckpointError
    )
    step = scores.get("step")
    if step is not None and not is_kind(step, int):
        raise CheckpointError(f"{path}: step is {step}; expected an integer. {advice}")

    # Scores are called TASK/METRIC.
    tasks = dict.fromkeys(name.split("/")[0] for name in scores if "/" in name)
    return Selection(
        rule="best mean score on the development splits",
        tasks=list(tasks),
        step=None if step is None else int(step),
        mean=scores.get("mean"),
    )


def save_report(report: Report, out: Path, *, last: bool) -> Report:
    """Writes the files of a report, and returns it with the name of the earlier report that is kept.

    A report that is there is copied before the first new one takes its place, when it has results
    that the new one lacks. The copy is removed once the last new report has all of them.

    Args:
        report: The report.
        out: The folder.
        last: Whether this is the last task.
    """
    # Keep results that only an earlier report has, before anything is overwritten.
    results = results_of_report(report)
    if report.earlier is None:
        copy = keep_earlier_report(out, results)
        report = replace(report, earlier=copy and copy.name)

    # After the last task: a copy is removed if nothing is missing from the new report.
    superseded = None
    if last and report.earlier is not None and is_superseded(out / report.earlier, results):
        superseded = out / report.earlier
        report = replace(report, earlier=None)

    write_reports(report, out)
    if superseded is not None:
        remove_earlier_report(superseded)
    return report


def write_reports(report: Report, out: Path) -> None:
    """Writes report.json, its views and timing.json to `out`, each whole or not at all."""
    board = build_scoreboard(report)
    content = json.dumps(to_json(report), indent=1, ensure_ascii=False)
    write_text(out / REPORT, seal(content) + "\n")
    if report.timings:
        write_text(out / TIMING, json.dumps(to_json(report.timings), indent=1) + "\n")
    write_text(out / "report.md", printable(markdown_report(report, board)))
    write_text(out / "report.html", printable(html_report(report, board)))
    write_text(out / "card.md", printable(model_card(report)))
