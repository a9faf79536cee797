"""python -m eval harness: tasks of lm-evaluation-harness (EleutherAI) by our scoring and decoding.

A task with choices costs one encoder pass for all choices of a context, where `lm_eval --model hf`
makes one for each. The same command evaluates our checkpoints:

    lm_eval --model hf --model_args \
        pretrained=DIR,trust_remote_code=True,backend=seq2seq,eval_capacity_factor=None --tasks NAME

The log-likelihoods of both are the same for a model that drops no token: a dense one, a dropless
one, and any other with `--dropless` here and `eval_capacity_factor=None` there, as above. With a
capacity they differ, since the tokens that are dropped depend on the batch.

The package is optional, so it is imported inside functions, after `require_harness`.
"""

import argparse
import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from eval.answers.inference import AS_SAVED, Inference, check_inference, describe_capacity
from eval.answers.seq2seq import load_seq2seq
from eval.commands.command import add_inference_options, inference_of, name_list
from moe.checks import shown
from moe.cli import Parser, integer, path
from moe.errors import ConfigError, DataError, did_you_mean
from moe.files import check_kind, claim_folder, output_path, write_text
from moe.inspection.tables import format_table
from moe.parsing import read_text

BATCH_SIZE = 32
_MOST_YAML = 2**20
_DEEPEST_YAML = 100

_TASK_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    ImportError,
    LookupError,
    TypeError,
    AttributeError,
)
"""Errors that lm-evaluation-harness raises for wrong YAML files or data, besides those of its libraries."""

_HEADER = ("task", "version", "shots", "filter", "metric", "value", "standard error")
_MAX_REASON = 300  # characters of another library's message

HarnessResults = dict[str, Any]
"""The results of lm-evaluation-harness in its own form, which is that of its results.json."""


def build_parser() -> Parser:
    """Returns the parser of the options."""
    parser = Parser(
        prog="python -m eval harness", description="Runs tasks of lm-evaluation-harness."
    )
    parser.add_argument("tasks", type=name_list, metavar="TASKS", help="names, separated by commas")
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
    add_inference_options(parser)
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Evaluates, and prints the table and the path of the results."""
    out = output_path(arguments.out, inputs=[arguments.model, arguments.include_path])
    check_kind(out, "harness evaluation")
    results = evaluate_on_harness(
        arguments.tasks,
        arguments.model,
        include_path=arguments.include_path,
        limit=arguments.limit,
        batch_size=arguments.batch_size,
        inference=inference_of(arguments),
    )
    print(format_results(results))

    in_use = f"Another evaluation writes to {out}. Wait for it, or give another --out."
    with claim_folder(out, "harness evaluation", in_use=in_use):
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
    inference: Inference = AS_SAVED,
) -> HarnessResults:
    """Returns the results of a checkpoint, with every example by task under `samples`.

    Args:
        tasks: Names of the package's tasks, groups and tags, or of those in `include_path`.
        model: Checkpoint folder, of this library or of transformers.
        include_path: Folder with YAML files of tasks.
        limit: Maximum number of examples of a task, from its start; None for all.
        batch_size: Contexts at once.
        inference: Capacity and dtype that override the checkpoint's own.

    Raises:
        CheckpointError: When the folder holds no such model.
        ConfigError: When the package is missing, or a task is unknown or needs what an
            encoder-decoder cannot do.
        DataError: When the data of a task cannot be loaded.
    """
    require_harness()
    from lm_eval import evaluator

    from eval.commands.harness_model import HarnessModel

    # Its advice is for its own models and options.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)

    selection = load_tasks(tasks, include_path)
    check_inference(inference, [model])
    system = load_seq2seq(model, inference=inference)
    simple_evaluate: Any = evaluator.simple_evaluate
    results: HarnessResults = simple_evaluate(
        HarnessModel(system, batch_size),
        tasks=selection.tasks,
        task_manager=selection.manager,
        limit=limit,
    )

    results["config"]["model"] = str(model)
    results["config"]["fingerprint"] = system.fingerprint
    results["config"]["batch_size"] = batch_size
    results["config"]["capacity"] = describe_capacity(system.model.config)
    results["config"]["dtype"] = str(system.model.dtype).removeprefix("torch.")
    command = ["python", "-m", "eval", "harness", ",".join(tasks), "--model", str(model)]
    results["command"] = shlex.join([*command, *inference.options.split()])
    return results


def require_harness() -> None:
    """Raises a ConfigError when lm-evaluation-harness is missing."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"lm-evaluation-harness is missing: pip install 'stmoe[harness]'. ({error})"
        ) from error


# ---------------------------------------------------------------------------
# Tasks


class HarnessTasks(NamedTuple):
    """Tasks of lm-evaluation-harness with their data.

    Attributes:
        manager: Its TaskManager.
        tasks: Its groups, and its tasks that are in none of them.
    """

    manager: Any
    tasks: list[Any]


def load_tasks(names: Sequence[str], include_path: Path | None = None) -> HarnessTasks:
    """Returns the tasks and groups of these names with their data.

    Raises:
        ConfigError: When a name is unknown, or a task needs what an encoder-decoder cannot do.
        DataError: When data cannot be loaded.
    """
    from datasets.exceptions import DatasetsError
    from jinja2 import TemplateError

    from eval.commands.harness_model import NO_ROLLING

    manager = _task_manager(names, include_path)
    try:
        loaded = manager.load(list(names))
    except (*_TASK_ERRORS, DatasetsError, TemplateError) as error:
        advice = ""
        if include_path:
            advice = f" Look into the YAML files in {include_path}, and the data that they name."
        raise DataError(
            f"The data of {', '.join(names)} cannot be loaded: {_reason(error)}.{advice}"
        ) from error

    for name, task in loaded["tasks"].items():
        if task.OUTPUT_TYPE == "loglikelihood_rolling":
            raise ConfigError(f"{name} cannot be run: {NO_ROLLING}")

    # A task of a group runs once, with its group.
    groups: Mapping[str, Any] = loaded.get("groups", {})
    grouped: set[str] = set()
    for group in groups.values():
        grouped.update(task.task_name for task in group.get_all_tasks())
    chosen = [group for name, group in groups.items() if name in names]
    chosen += [task for name, task in loaded["tasks"].items() if name not in grouped]
    return HarnessTasks(manager, chosen)


def _task_manager(names: Sequence[str], include_path: Path | None) -> Any:
    """Returns a TaskManager that knows all of these names, or raises a ConfigError."""
    from lm_eval.tasks import TaskManager

    if include_path is not None and not include_path.is_dir():
        raise ConfigError(
            f"--include-path {include_path} is not a folder. Give one with the YAML files of tasks."
        )

    if include_path is not None:
        for file in sorted(include_path.rglob("*.yaml")):
            _check_task_file(file)

    # The package's own tasks are many files, so first try without them.
    manager = None
    if include_path is not None:
        manager = TaskManager(include_path=include_path, include_defaults=False)
    if manager is None or not set(names) <= set(manager.all_subtasks):
        manager = TaskManager(include_path=include_path)

    for name in names:
        if name not in manager.task_index:
            raise ConfigError(
                f"lm-evaluation-harness has no task {name!r}."
                f"{did_you_mean(name, manager.all_tasks)} Choose from `lm_eval ls tasks`, or give "
                "the folder of your own as --include-path."
            )
    return manager


def _check_task_file(file: Path) -> None:
    """Raises a ConfigError for YAML that would crash lm_eval's reader, which is in C, or run code."""
    advice = "Correct the file, or move it elsewhere."
    text = read_text(file, advice=advice, error=ConfigError)
    if len(text) > _MOST_YAML:
        raise ConfigError(f"{file} has more than {_MOST_YAML:,} characters. {advice}")

    depth = 0
    is_mapping = False
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            is_mapping |= depth == 0 and isinstance(event, yaml.MappingStartEvent)
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST_YAML:
                raise ConfigError(f"{file} nests more than {_DEEPEST_YAML} levels deep. {advice}")
            tag = getattr(event, "tag", None) or ""
            if tag.startswith("tag:yaml.org,2002:python/"):
                raise ConfigError(f"{file} has the tag {shown(tag)}, which runs code. {advice}")
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{file} is not YAML: {reason}. {advice}") from error
    if not is_mapping:
        raise ConfigError(f"{file} is not a YAML mapping. {advice}")


def _reason(error: BaseException) -> str:
    """Returns why a task cannot be loaded; `datasets` hides it in the cause of its own error."""
    if type(error).__name__ == "DatasetGenerationError" and error.__cause__ is not None:
        error = error.__cause__

    text = " ".join(str(error).split())[:_MAX_REASON].rstrip(".")
    if isinstance(error, KeyError):
        return f"there is no {text}"
    return text or "a setting has another type than lm-evaluation-harness expects"


# ---------------------------------------------------------------------------
# Results


def format_results(results: HarnessResults) -> str:
    """Returns a table of every score of tasks and groups, with its standard error if it has one."""
    rows: list[list[str]] = []
    for name, scores in {**results["results"], **results.get("groups", {})}.items():
        for key, value in scores.items():
            # A key is `metric,filter`; other keys are not scores.
            metric, separator, filter_name = key.partition(",")
            if not separator or metric.endswith("_stderr"):
                continue
            rows.append(
                [
                    name,
                    str(results["versions"].get(name, "")),
                    str(results["n-shot"].get(name, "")),
                    filter_name,
                    metric,
                    _format_number(value),
                    _format_number(scores.get(f"{metric}_stderr,{filter_name}", "")),
                ]
            )
    return format_table(_HEADER, rows)


def _format_number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def save_results(results: HarnessResults, folder: Path) -> None:
    """Writes results.json, and every example to samples.TASK.jsonl."""
    from lm_eval.utils import handle_non_serializable

    without_samples = {name: value for name, value in results.items() if name != "samples"}
    text = json.dumps(without_samples, indent=1, default=handle_non_serializable)
    write_text(folder / "results.json", text + "\n")

    for name, samples in results["samples"].items():
        lines = [json.dumps(sample, default=handle_non_serializable) + "\n" for sample in samples]
        write_text(folder / f"samples.{name.replace('/', '_')}.jsonl", "".join(lines))
