"""python -m eval harness: tasks of lm-evaluation-harness (EleutherAI) through our own scoring and
decoding.

A task with choices costs one encoder pass for all choices of a context, where `lm_eval --model hf`
makes one for each; the log-likelihoods are the same. That command serves our checkpoints too:

    lm_eval --model hf --model_args pretrained=DIR,trust_remote_code=True,backend=seq2seq --tasks
    NAME
"""

import argparse
import json
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.answers.predict import load_seq2seq
from eval.names import split_names
from moe import ConfigError, DataError, did_you_mean
from moe.checks import check_integer
from moe.cli import integer, path
from moe.files import check_kind, claim_folder, output_path, write_text
from moe.inspection.tables import format_table
from moe.parsing import check_yaml

BATCH_SIZE = 32
# What a task's YAML file and data of any content make lm-evaluation-harness raise, beside errors of
# its own libraries.
_FAILURES_OF_TASKS = (
    OSError,
    ValueError,
    RuntimeError,
    ImportError,
    LookupError,
    TypeError,
    AttributeError,
)
ROLLING = (
    "it asks for loglikelihood_rolling, the probability of a text without an input. An encoder-decoder then reads a "
    "lone end token, and what comes out compares neither with a causal model's perplexity nor with the loss on "
    "corrupted spans. Leave it out."
)


def add_harness_command(commands: Any) -> None:
    """Adds `harness` to the parsers of python -m eval."""
    parser = commands.add_parser("harness", help="runs tasks of lm-evaluation-harness")
    parser.add_argument("tasks", help="names, separated by commas")
    parser.add_argument("--model", required=True, type=path, help="checkpoint folder")
    parser.add_argument(
        "--include-path", type=path, help="folder with the YAML files of tasks of your own"
    )
    parser.add_argument("--limit", type=integer(least=1), help="most examples of a task")
    parser.add_argument(
        "--out", default="runs/harness", help="folder of results.json (default: runs/harness)"
    )
    parser.add_argument(
        "--batch-size",
        type=integer(least=1),
        default=BATCH_SIZE,
        help=f"contexts at once ({BATCH_SIZE})",
    )


def run_harness(arguments: argparse.Namespace) -> None:
    """Evaluates, prints the table and says where the results are."""
    out = output_path(arguments.out, inputs=[arguments.model, arguments.include_path])
    check_kind(out, "harness evaluation")
    results = evaluate_on_harness(
        split_names("TASKS", arguments.tasks),
        arguments.model,
        include_path=arguments.include_path,
        limit=arguments.limit,
        batch_size=arguments.batch_size,
    )
    print(format_results(results))
    taken = f"Another evaluation writes to {out}. Wait for it, or give another --out."
    with claim_folder(out, "harness evaluation", taken=taken):
        save_results(results, out)
    print(
        f"The results are in {out / 'results.json'}, each example in samples.TASK.jsonl beside it."
    )


def evaluate_on_harness(
    tasks: Sequence[str],
    model: Path,
    *,
    include_path: Path | None = None,
    limit: int | None = None,
    batch_size: int = BATCH_SIZE,
) -> dict[str, Any]:
    """Returns what lm-evaluation-harness says of a checkpoint, with `samples`: every example by
    task.

    Args:
        tasks: Names of its tasks, groups and tags, and of those in `include_path`.
        model: Checkpoint folder, of this library or of transformers.
        include_path: Folder with YAML files of tasks.
        limit: Most examples of a task, its first; None for all.
        batch_size: Contexts at once.

    Raises:
        CheckpointError: When the folder holds no such model.
        ConfigError: When the package is missing, a task is unknown or needs what an encoder-decoder
            cannot do, or a number is below 1.
        DataError: When the data of a task cannot be loaded.
    """
    check_integer("--limit", limit, least=1, optional="none for all")
    check_integer("--batch-size", batch_size, least=1)
    require_harness()
    from lm_eval import evaluator

    from eval.harness_model import HarnessModel

    logging.getLogger("lm_eval").setLevel(
        logging.ERROR
    )  # its advice is for its own models and options
    manager, chosen = load_tasks(tasks, include_path)
    system = load_seq2seq(model)
    evaluate: Any = evaluator.simple_evaluate
    found = evaluate(
        HarnessModel(system, batch_size), tasks=chosen, task_manager=manager, limit=limit
    )
    found["config"] |= {
        "model": str(model),
        "fingerprint": system.fingerprint,
        "batch_size": batch_size,
    }
    found["command"] = shlex.join(
        ["python", "-m", "eval", "harness", ",".join(tasks), "--model", str(model)]
    )
    return found


def require_harness() -> None:
    """Raises a ConfigError when lm-evaluation-harness is missing."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"lm-evaluation-harness is missing: pip install 'stmoe[harness]'. ({error})"
        ) from error


def load_tasks(names: Sequence[str], include_path: Path | None = None) -> tuple[Any, list[Any]]:
    """Returns lm-evaluation-harness's manager of tasks, and its tasks and groups of these names
    with their data.

    Raises:
        ConfigError: When a name is unknown, or a task needs what an encoder-decoder cannot do.
        DataError: When data cannot be loaded.
    """
    from datasets.exceptions import DatasetsError
    from jinja2 import TemplateError
    from lm_eval.tasks import TaskManager

    if include_path is not None and not include_path.is_dir():
        raise ConfigError(
            f"--include-path {include_path} is no folder. Give one with the YAML files of tasks."
        )
    for file in sorted(include_path.rglob("*.yaml")) if include_path else []:
        check_yaml(file)
    manager = (
        TaskManager(include_path=include_path, include_defaults=False) if include_path else None
    )
    if manager is None or not set(names) <= set(
        manager.all_subtasks
    ):  # all others are many files to read
        manager = TaskManager(include_path=include_path)
    for name in names:
        if name not in manager.task_index:
            raise ConfigError(
                f"lm-evaluation-harness has no task {name!r}.{did_you_mean(name, manager.all_tasks)} Choose from "
                "`lm_eval ls tasks`, or give the folder of your own as --include-path."
            )
    try:
        loaded = manager.load(list(names))
    except (*_FAILURES_OF_TASKS, DatasetsError, TemplateError) as error:
        where = (
            f" Look into the YAML files in {include_path}, and the data that they name."
            if include_path
            else ""
        )
        raise DataError(
            f"The data of {', '.join(names)} cannot be loaded: {_reason(error)}.{where}"
        ) from error
    for name, task in loaded["tasks"].items():
        if task.OUTPUT_TYPE == "loglikelihood_rolling":
            raise ConfigError(f"{name} cannot be run: {ROLLING}")
    groups = loaded.get("groups", {})
    inside = {task.task_name for group in groups.values() for task in group.get_all_tasks()}
    return manager, [
        *(group for name, group in groups.items() if name in names),
        *(task for name, task in loaded["tasks"].items() if name not in inside),
    ]


def _reason(error: BaseException) -> str:
    """Returns why a task cannot be loaded; `datasets` says it in the error that was the cause of
    its own.
    """
    if type(error).__name__ == "DatasetGenerationError" and error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())[:300].rstrip(".")
    if isinstance(error, KeyError):
        return f"there is no {text}"
    return text or "a setting is of another type than lm-evaluation-harness expects"


def format_results(results: dict[str, Any]) -> str:
    """Returns a table of every score of tasks and groups, with its standard error where there is
    one.
    """
    header, rows = ("task", "version", "shots", "filter", "metric", "value", "standard error"), []
    for name, scores in {**results["results"], **results.get("groups", {})}.items():
        for key, value in scores.items():
            metric, separator, kind = key.partition(",")
            if not separator or metric.endswith("_stderr"):
                continue
            cells = (
                results["versions"].get(name, ""),
                results["n-shot"].get(name, ""),
                kind,
                metric,
            )
            numbers = [value, scores.get(f"{metric}_stderr,{kind}", "")]
            numbers = [
                f"{number:.4f}" if isinstance(number, float) else str(number) for number in numbers
            ]
            rows.append([name, *map(str, cells), *numbers])
    return format_table(header, rows)


def save_results(results: dict[str, Any], folder: Path) -> None:
    """Writes results.json, and every example to samples.TASK.jsonl."""
    from lm_eval.utils import handle_non_serializable

    whole = {name: value for name, value in results.items() if name != "samples"}
    text = json.dumps(whole, indent=1, default=handle_non_serializable)
    write_text(folder / "results.json", text + "\n")
    for name, samples in results["samples"].items():
        lines = (json.dumps(sample, default=handle_non_serializable) + "\n" for sample in samples)
        write_text(folder / f"samples.{name.replace('/', '_')}.jsonl", "".join(lines))
