"""The files of a report: report.json for programs, report.md and report.html for people, card.md
for a model card, timing.json for values that differ between runs.
"""

import json
import platform
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
from stmoe_eval.answers.seq2seq import Seq2Seq
from stmoe_eval.reports.card import model_card
from stmoe_eval.reports.records import ModelInfo, Report, Selection
from stmoe_eval.reports.report_text import html_report, markdown_report
from stmoe_eval.reports.run_folder import REPORT

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
    content = read_json(path, advice=advice, error=CheckpointError)
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


def write_reports(report: Report, out: Path) -> None:
    """Writes report.json, its views and timing.json to `out`, each whole or not at all."""
    content = json.dumps(to_json(report), indent=1, ensure_ascii=False)
    write_text(out / REPORT, content + "\n")
    if report.timings:
        write_text(out / TIMING, json.dumps(to_json(report.timings), indent=1) + "\n")
    write_text(out / "report.md", printable(markdown_report(report)))
    write_text(out / "report.html", printable(html_report(report)))
    write_text(out / "card.md", printable(model_card(report)))
