"""An evaluation from end to end: models and tasks in, report files out."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from moe.distributed.collectives import enter_on_rank_zero, gather_or_raise
from moe.distributed.launch import World
from moe.errors import ConfigError, DataError, DistributedError, MoEError, did_you_mean
from moe.files import check_kind, claim_folder
from stmoe_eval.answers.batches import requests_of
from stmoe_eval.answers.cost import Timing, cost_of, merge_timings, read_timings, token_flops
from stmoe_eval.answers.data_ranks import SINGLE_PROCESS, arrange_ranks
from stmoe_eval.answers.inference import AS_SAVED, Inference
from stmoe_eval.answers.likelihood import Scoring
from stmoe_eval.answers.predict import MODES, Predicted, modes_of, predict
from stmoe_eval.answers.predictions_file import check_inference_of_file
from stmoe_eval.answers.seq2seq import Seq2Seq, load_seq2seq
from stmoe_eval.baselines.data import BaselineSettings, read_baseline_data
from stmoe_eval.reports.contamination import load_training_text, task_contamination
from stmoe_eval.reports.records import (
    DataInfo,
    FailedTask,
    Report,
    RunSettings,
    SystemResult,
    TaskResult,
)
from stmoe_eval.reports.report_files import device_name, library_versions, model_info, write_reports
from stmoe_eval.reports.run_folder import predictions_path, write_examples
from stmoe_eval.reports.task_summary import (
    HeadlineDraws,
    TaskExamples,
    summarize_task,
    superglue_averages,
)
from stmoe_eval.scores.metrics import unwrap_values
from stmoe_eval.source import BuiltIn, HubData
from stmoe_eval.submission import Submission, write_submission
from stmoe_eval.task import TASKS, Example, Task, limit_examples
from stmoe_eval.text.preprocess import HIDDEN_LABEL, HIDDEN_TARGET

T = TypeVar("T")


def evaluate(
    models: Mapping[str, Path],
    tasks: Sequence[str | Task],
    *,
    modes: Sequence[str] | None = None,
    split: str | None = None,
    limit: int | None = None,
    data: Path | None = None,
    revision: str | None = None,
    scoring: Scoring | None = None,
    baselines: BaselineSettings | None = None,
    contamination: Path | None = None,
    out: Path,
    command: str,
    world: World = SINGLE_PROCESS.world,
    ep: int = 1,
    tp: int = 1,
    inference: Inference = AS_SAVED,
) -> Report | None:
    """Evaluates models on tasks, writes the reports and returns their content.

    The reports are written after each task. A task that fails, e.g. because its data cannot be
    loaded, is reported with its message, and the others continue.

    Every rank must call it with the same arguments but `world`. All of them predict; only rank 0
    scores, writes and returns a report. Nothing depends on the number of ranks.

    Args:
        models: Checkpoint folders by name; the report is about the first one.
        tasks: Names of tasks, or tasks that are in no registry, as of the user's own pairs.
        modes: `generate`, `rank`; the ones that a task supports are used. None for both.
        split: Split of all tasks; None for each task's own.
        limit: Maximum number of examples of a task; whole groups are taken, evenly. None for all.
        data: Holds a folder TASK with files in place of the hub's rows. None for the hub.
        revision: Branch or commit of the hub's data; None for each task's own.
        scoring: How choices are ranked; None for the log-probability with the end token.
        baselines: Data that the baselines may use; None for all training examples.
        contamination: Folder of a corpus to search for the examples; None for none.
        out: Receives examples/, predictions/ and the reports; existing reports are replaced.
        command: The command line, for the report.
        world: The ranks.
        ep: Ranks over which the experts of a layer are sharded.
        tp: Ranks over which heads and hidden units are sharded.
        inference: Capacity and dtype that override the checkpoints' own. Answers of the same model
            with another `Inference` cannot be resumed.

    Raises:
        ConfigError: When a task or mode is impossible, or the ranks cannot be divided in this way.
        CheckpointError: When a model cannot be loaded.
        DataError: When `out` is not the folder of an evaluation, another
            evaluation writes there, it has answers of these models with another `inference`, or
            `contamination` is not a corpus.
    """
    # Reject invalid requests before loading anything.
    chosen = check_tasks(tasks, modes)
    baselines = baselines or BaselineSettings()
    _check_file_names(models, chosen, out)
    gather_or_raise(lambda: check_kind(out, "evaluation"))

    # Only rank 0 fits the baselines and computes the scores.
    is_first = world.rank == 0
    training_text = load_training_text(contamination) if contamination else None

    # Every model on every rank, whole or in parts.
    scoring = scoring or Scoring()
    ranks = arrange_ranks(world, ep, tp, models.values())
    systems = {name: load_seq2seq(folder, ranks, inference) for name, folder in models.items()}
    report = Report(
        command=command,
        settings=RunSettings(
            tasks=[task.name for task in chosen],
            modes=modes and list(modes),
            split=split,
            limit=limit,
            data=data and str(data),
            revision=revision,
            scoring=scoring,
            ranks=world.size,
            ep=ep,
            tp=tp,
            baselines=baselines,
            contamination=contamination and str(contamination),
            inference=inference,
        ),
        versions=library_versions(),
        device=device_name(),
        models={name: model_info(models[name], system) for name, system in systems.items()},
    )

    # Check that existing answers can be resumed before anything is written.
    gather_or_raise(lambda: _check_answers(systems, chosen, out))

    # Lengths of inputs are counted in tokens of the first model.
    tokenizer = next(iter(systems.values())).tokenizer
    results: list[TaskResult] = []
    failed: list[FailedTask] = []
    draws: HeadlineDraws = {}
    timings: list[Timing] = []
    earlier_timings = read_timings(out)
    in_use = f"Another evaluation writes to {out}. Wait for it, or give another --out."
    with enter_on_rank_zero(lambda: claim_folder(out, "evaluation", in_use=in_use)):
        for task in chosen:
            with _reporting_failure(task.name, failed, single_process=world.size == 1):
                folder = None if isinstance(task.source, BuiltIn) else data
                asked = read_task(task, split or task.split, limit, folder, revision)
                fit = partial(read_baseline_data, task, baselines, folder)
                asked = asked._replace(baselines=_together(fit if is_first else _nothing))
                answers = _answer_task(systems, asked, modes, scoring, out)
                if is_first:
                    digest = write_examples(out, task, asked.examples)
                    submissions = _write_submissions(out, asked, answers)
                    result, task_draws = summarize_task(
                        asked, answers, tokenizer, report.models, digest, submissions
                    )
                    result = _with_costs(result, systems, answers)
                    timings += _timings(report, result, answers)
                    if training_text:
                        shared = task_contamination(asked, answers, training_text)
                        result = replace(result, contamination=shared)
                    results.append(result)
                    draws |= task_draws

            # The reports are written after each task: a stopped run keeps its finished tasks.
            if is_first:
                averages = superglue_averages(results, draws)
                merged = merge_timings(earlier_timings, timings)
                report = replace(
                    report, tasks=[*results], averages=averages, failed=[*failed], timings=merged
                )
                write_reports(report, out)
    return report if is_first else None


# ---------------------------------------------------------------------------
# Tasks and their examples


def check_tasks(tasks: Sequence[str | Task], modes: Sequence[str] | None) -> list[Task]:
    """Returns the tasks, given themselves or by name, each once.

    Raises:
        ConfigError: When there is no such task or mode, or a task supports none of the modes.
    """
    by_name: dict[str, Task] = {}
    for item in tasks:
        task = item if isinstance(item, Task) else TASKS.get(item.strip())
        by_name[task.name] = task
    chosen = list(by_name.values())
    for mode in modes or ():
        if mode not in MODES:
            raise ConfigError(
                f"There is no mode {mode!r}.{did_you_mean(mode, MODES)} "
                f"Choose from {', '.join(MODES)}."
            )

    for task in chosen:
        if modes is not None and not set(modes) & set(modes_of(task)):
            raise ConfigError(
                f"{task.name} cannot be evaluated by {' or '.join(modes)}, only by "
                f"{' or '.join(modes_of(task))}. Change --modes or leave it out."
            )
    return chosen


def read_task(
    task: Task,
    split: str,
    limit: int | None = None,
    data: Path | None = None,
    revision: str | None = None,
) -> TaskExamples:
    """Returns the examples of a task, and where they come from.

    All ranks read the rows.

    Args:
        task: The task.
        split: The split that is evaluated.
        limit: Most examples; None for all.
        data: Holds a folder TASK with files in place of the hub's rows. None for the hub.
        revision: Branch or commit of the hub's data; None for the task's own.

    Raises:
        DataError: When the rows cannot be loaded on some rank, are not valid for the task, or lack
            labels in a split that has them.
    """
    folder = None if isinstance(task.source, BuiltIn) else data
    rows = _together(partial(task.rows, split, folder, revision))

    # Examples without a label are answered, but not scored: only where this is expected.
    available = task.examples_of(rows, split)
    if not available:
        raise DataError(
            f"No example of {task.name} can be built from the {len(rows):,} rows of split {split!r}."
        )
    num_hidden = sum(map(_has_hidden_label, available))
    if num_hidden and split not in task.source.hidden:
        others = [name for name in task.source.splits if name != split]
        choice = f", or choose another split: {' or '.join(others)}" if others else ""
        raise DataError(
            f"{num_hidden:,} of {len(available):,} examples of {task.name} have no label in split "
            f"{split!r}, so their answers cannot be scored. Give rows with labels{choice}."
        )

    # The limit is reported only where it left examples out.
    examples = limit_examples(available, limit)
    return TaskExamples(
        task=task,
        split=split,
        limit=limit if len(examples) < len(available) else None,
        data=_data_info(task, split, folder, revision),
        num_rows=len(rows),
        num_expected=task.source.expected(split),
        num_available=len(available),
        examples=examples,
        num_hidden=sum(map(_has_hidden_label, examples)),
    )


def _together(read: Callable[[], T]) -> T:
    """Returns the result of `read` on this rank; an error of any rank is raised on all of them."""
    try:
        result = read()
    except Exception as error:
        gather_or_raise(partial(_raise, error))
        raise
    gather_or_raise(_nothing)
    return result


def _nothing() -> None:
    return None


def _raise(error: Exception) -> None:
    raise error


def _has_hidden_label(example: Example) -> bool:
    # The target of wsc is the candidate, hidden label or not.
    return example.targets == HIDDEN_TARGET or example.fields.get("label") == HIDDEN_LABEL


def _data_info(task: Task, split: str, folder: Path | None, revision: str | None) -> DataInfo:
    """Returns the origin of the rows of a task."""
    rows_folder = task.rows_folder(folder)
    source = task.source
    on_hub = isinstance(source, HubData)
    return DataInfo(
        folder=None if rows_folder is None else str(rows_folder),
        repository=source.repository if on_hub else None,
        config=source.config if on_hub else None,
        split=source.hub_splits.get(split, split) if on_hub else split,
        revision=revision or (" or ".join(source.revisions) if on_hub else None),
        origin=None if on_hub or rows_folder is not None else source.origin,
    )


def _answer_task(
    systems: Mapping[str, Seq2Seq],
    asked: TaskExamples,
    modes: Sequence[str] | None,
    scoring: Scoring,
    out: Path,
) -> dict[tuple[str, str], Predicted]:
    """Returns the answers of every system in every mode."""
    task = asked.task
    requests = requests_of(asked.examples)
    answers: dict[tuple[str, str], Predicted] = {}
    for name, system in systems.items():
        for mode in modes_of(task):
            if modes is None or mode in modes:
                path = predictions_path(out, task.name, name, mode)
                answers[name, mode] = predict(system, task, requests, mode, path, scoring)
    return answers


def _write_submissions(
    out: Path, asked: TaskExamples, answers: Mapping[tuple[str, str], Predicted]
) -> dict[tuple[str, str], Submission | None]:
    """Writes every system's answers in the format of the benchmark's site.

    Args:
        out: Folder of the run.
        asked: The examples; a part of them, or another split than the test split, gives no file.
        answers: By system and mode.
    """
    form = asked.task.submission
    if form is None or asked.split != "test" or asked.limit is not None:
        return {}

    features = [example.fields for example in asked.examples]
    submissions: dict[tuple[str, str], Submission | None] = {}
    for (name, mode), predicted in answers.items():
        values = unwrap_values(asked.task.values(asked.examples, predicted.outputs).answers)
        submissions[name, mode] = write_submission(form, out, f"{name}.{mode}", features, values)
    return submissions


# ---------------------------------------------------------------------------
# What answers cost


def _with_costs(
    result: TaskResult, systems: Mapping[str, Seq2Seq], answers: Mapping[tuple[str, str], Predicted]
) -> TaskResult:
    """Returns a result with the cost of an example for each model."""
    with_costs: list[SystemResult] = []
    for system in result.systems:
        predicted = answers.get((system.name, system.mode))
        if predicted is not None:
            flops = token_flops(systems[system.name].model)
            system = replace(system, cost=cost_of(predicted.tokens, flops))
        with_costs.append(system)
    return replace(result, systems=with_costs)


def _timings(
    report: Report, result: TaskResult, answers: Mapping[tuple[str, str], Predicted]
) -> list[Timing]:
    """Returns the speed of the models in the part that this run computed itself."""
    timings: list[Timing] = []
    for (name, mode), predicted in answers.items():
        if predicted.timed is None:
            continue
        seconds, tokens = predicted.timed
        num_tokens = tokens.inputs + tokens.outputs
        timings.append(
            Timing(
                task=result.task,
                system=name,
                mode=mode,
                model=report.models[name].identity,
                device=report.device,
                ranks=report.settings.ranks,
                seconds=seconds,
                examples=tokens.examples,
                tokens=num_tokens,
                tokens_per_second=num_tokens / max(seconds, 1e-9),
            )
        )
    return timings


# ---------------------------------------------------------------------------
# The folder of the reports


def _check_file_names(models: Iterable[str], tasks: Iterable[Task], out: Path) -> None:
    """Raises a ConfigError when the answers of two models to two tasks would be one file."""
    owners: dict[Path, str] = {}
    for name in models:
        for task in tasks:
            path = predictions_path(out, task.name, name, "generate")
            if path in owners:
                raise ConfigError(
                    f"The answers of {name!r} to {task.name} and those of {owners[path]} would go into the same file, "
                    f"{path}. Give the models other names: NAME=FOLDER."
                )
            owners[path] = f"{name!r} to {task.name}"


def _check_answers(systems: Mapping[str, Seq2Seq], tasks: Iterable[Task], out: Path) -> None:
    """Raises a DataError when predictions of a model were made with other settings."""
    for name, system in systems.items():
        if system.ranks.world.rank != 0:
            return
        for task in tasks:
            for mode in modes_of(task):
                path = predictions_path(out, task.name, name, mode)
                check_inference_of_file(path, system.fingerprint, system.inference)


@contextlib.contextmanager
def _reporting_failure(
    task: str, failed: list[FailedTask], *, single_process: bool
) -> Iterator[None]:
    """Adds an error that is raised inside to `failed`.

    Some still end the evaluation: a lost rank, and on several ranks an error of unknown kind, which
    may occur on one rank only. An error of this library or of the system is raised on all ranks
    alike.
    """
    try:
        yield
    except DistributedError:
        raise
    except Exception as error:
        is_ours = isinstance(error, MoEError)
        if not (single_process or is_ours or isinstance(error, OSError)):
            raise
        message = str(error) if is_ours else f"{type(error).__name__}: {error}"
        failed.append(FailedTask(task, message))
