"""An evaluation from end to end: models and tasks in, report files out."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.answers.batches import Request
from eval.answers.data_ranks import SINGLE_PROCESS, arrange_ranks
from eval.answers.likelihood import Scoring
from eval.answers.predict import MODES, Predicted, modes_of, predict
from eval.answers.seq2seq import Seq2Seq, load_seq2seq
from eval.records import DataInfo, FailedTask, Report, RunSettings, TaskResult
from eval.reports.report_files import device_name, library_versions, model_info, save_report
from eval.reports.task_summary import (
    HeadlineDraws,
    TaskExamples,
    summarize_task,
    superglue_averages,
)
from eval.run_folder import predictions_path, write_examples
from eval.source import BuiltIn, HubData
from eval.task import SPLITS, TASKS, Example, Task
from eval.text.preprocess import HIDDEN_TARGET
from moe import (
    ConfigError,
    DataError,
    DistributedError,
    MoEError,
    World,
    did_you_mean,
    gather_or_raise,
)
from moe.checks import check_integer
from moe.files import check_kind, claim_folder


def evaluate(
    models: Mapping[str, Path],
    tasks: Sequence[str],
    *,
    modes: Sequence[str] | None = None,
    split: str | None = None,
    limit: int | None = None,
    data: Path | None = None,
    revision: str | None = None,
    scoring: Scoring | None = None,
    out: Path,
    command: str,
    world: World = SINGLE_PROCESS.world,
    ep: int = 1,
    tp: int = 1,
) -> Report | None:
    """Evaluates every model on every task in every mode, writes the reports and returns their
    content.

    The reports are written after each task. One that fails, as its data cannot be had, is reported
    with its message, and the others go on.

    Every rank must call it with the same arguments but `world`. All of them predict; rank 0 alone
    scores, writes and has something to return. Nothing depends on the number of ranks.

    Args:
        models: Checkpoint folders by name; the first is the one that the report is about.
        tasks: Names of tasks.
        modes: `generate`, `rank`; of these, all that a task can be answered in. None for both.
        split: Of all tasks; None for each task's own.
        limit: Most examples of a task; whole groups are taken, evenly. None for all.
        data: Holds a folder TASK with files in place of the hub's rows. None for the hub.
        revision: Branch or commit of the hub's data; None for each task's own.
        scoring: How choices are ranked; None for the log-probability with the end token.
        out: Receives examples/, predictions/ and the reports. A report that is there, with results
            that the new one lacks, is kept as report.1.json.
        command: How it was called, for the report.
        world: The ranks.
        ep: Ranks that the experts of a layer are spread over.
        tp: Ranks that heads and hidden units are spread over.

    Raises:
        ConfigError: When a task, mode, split or limit is impossible, or the ranks cannot be divided
            so.
        CheckpointError: When a model cannot be loaded.
        DataError: When `out` cannot be made or is no folder of an evaluation, or another evaluation
            writes there.
    """
    chosen = check_tasks(tasks, modes, split)
    check_integer("--limit", limit, least=1, optional="none for all")
    _check_files(models, chosen, out)
    gather_or_raise(lambda: _check_folder(out))
    scoring = scoring or Scoring()
    ranks = arrange_ranks(world, ep, tp, models.values())
    systems = {name: load_seq2seq(folder, ranks) for name, folder in models.items()}
    settings = RunSettings(
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
    )
    report = Report(
        command=command,
        settings=settings,
        versions=library_versions(),
        device=device_name(),
        models={name: model_info(models[name], system) for name, system in systems.items()},
    )
    tokenizer = next(iter(systems.values())).tokenizer
    tasks: list[TaskResult] = []
    failed: list[FailedTask] = []
    draws: HeadlineDraws = {}
    with _only_writer(out, world):
        for task in chosen:
            with _reporting_failure(task.name, failed, alone=world.size == 1):
                asked = read_task(task, split or task.split, limit, data, revision)
                answers = _answers(systems, task, asked.examples, modes, scoring, out)
                if world.rank == 0:
                    written = write_examples(out, task, asked.examples)
                    result, task_draws = summarize_task(
                        asked, answers, tokenizer, report.models, written
                    )
                    tasks.append(result)
                    draws |= task_draws

            # The reports are written after each task: a run that is stopped has what it finished.
            if world.rank == 0:
                averages = superglue_averages(tasks, draws)
                report = replace(report, tasks=[*tasks], averages=averages, failed=[*failed])
                report = save_report(report, out, last=task is chosen[-1])
    return report if world.rank == 0 else None


def check_tasks(tasks: Sequence[str], modes: Sequence[str] | None, split: str | None) -> list[Task]:
    """Returns the tasks of these names, each once.

    Raises:
        ConfigError: When there is no such task, mode or split, or a task can be answered in none of
            the modes.
    """
    chosen = [TASKS.get(name) for name in dict.fromkeys(name.strip() for name in tasks)]
    for mode in modes or ():
        if mode not in MODES:
            raise ConfigError(
                f"There is no mode {mode!r}.{did_you_mean(mode, MODES)} Choose from {', '.join(MODES)}."
            )
    if split is not None and split not in SPLITS:
        raise ConfigError(f"There is no split {split!r}. Choose from {', '.join(SPLITS)}.")
    for task in chosen:
        if modes is not None and not set(modes) & set(modes_of(task)):
            raise ConfigError(
                f"{task.name} cannot be evaluated by {' or '.join(modes)}, only by {' or '.join(modes_of(task))}. "
                "Change --modes or leave it out."
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

    Raises:
        DataError: When the rows cannot be had, on any rank, are not what the task expects, or hide
            their labels.
    """
    read: list[Any] = []
    built_in = isinstance(task.source, BuiltIn)
    folder = None if built_in else data
    gather_or_raise(lambda: read.extend(task.rows(split, folder, revision)))
    every = task.examples_of(read, split)
    if not every:
        raise DataError(
            f"No example of {task.name} can be made of the {len(read):,} rows of split {split!r}."
        )
    # The target of wsc is the candidate, hidden label or not.
    if num_hidden := sum(
        example.targets == HIDDEN_TARGET or example.fields.get("label") == -1 for example in every
    ):
        raise DataError(
            f"The labels of {num_hidden:,} of {len(every):,} examples of {task.name} are hidden in split {split!r}, so "
            f"answers cannot be judged. Choose another split, as {task.split}."
        )
    examples = thin_out(every, limit)
    return TaskExamples(
        task=task,
        split=split,
        limit=limit if len(examples) < len(every) else None,
        data=_data_info(task, split, folder, revision),
        num_rows=len(read),
        num_expected=task.source.expected(split),
        num_available=len(every),
        examples=examples,
    )


def _data_info(task: Task, split: str, folder: Path | None, revision: str | None) -> DataInfo:
    """Returns where the rows of a task come from."""
    source = task.source
    repository = config = None
    source_split = split
    if isinstance(source, HubData):
        repository = source.repository
        config = source.config
        source_split = source.hub_splits.get(split, split)
        revision = revision or " or ".join(source.revisions)
    return DataInfo(
        folder=None if folder is None else str(folder / (task.variant_of or task.name)),
        repository=repository,
        config=config,
        split=source_split,
        revision=revision,
    )


def thin_out(examples: Sequence[Example], limit: int | None) -> list[Example]:
    """Returns at most `limit` examples: whole groups, evenly taken, and at least one group."""
    if limit is None or limit >= len(examples):
        return list(examples)
    members: dict[str, list[int]] = {}
    for number, example in enumerate(examples):
        members.setdefault(example.group, []).append(number)
    groups = list(members.values())
    for num_taken in range(min(len(groups), limit), 0, -1):
        taken = [groups[i * len(groups) // num_taken] for i in range(num_taken)]
        if sum(map(len, taken)) <= limit or num_taken == 1:
            return [
                examples[number] for number in sorted(number for group in taken for number in group)
            ]
    return []


def score(task: Task, examples: Sequence[Example], outputs: Sequence[str]) -> dict[str, float]:
    """Returns the score of every metric, without intervals; NaN where no example counts."""
    targets, answers = task.values(examples, outputs)
    return {metric.name: metric.score(targets, answers) for metric in task.metrics}


def requests_of(examples: Sequence[Example]) -> list[Request]:
    """Returns what a model is asked."""
    return [Request(example.id, example.inputs, example.choices) for example in examples]


def _answers(
    systems: Mapping[str, Seq2Seq],
    task: Task,
    examples: Sequence[Example],
    modes: Sequence[str] | None,
    scoring: Scoring,
    out: Path,
) -> dict[tuple[str, str], Predicted]:
    """Returns what every system answered in every mode."""
    answers = {}
    for name, system in systems.items():
        for mode in (mode for mode in modes_of(task) if modes is None or mode in modes):
            path = predictions_path(out, task.name, name, mode)
            answers[name, mode] = predict(system, task, requests_of(examples), mode, path, scoring)
    return answers


def _check_files(models: Iterable[str], tasks: Iterable[Task], out: Path) -> None:
    """Raises a ConfigError when the answers of two models to two tasks would be one file."""
    owners: dict[Path, str] = {}
    for name in models:
        for task in tasks:
            path = predictions_path(out, task.name, name, "generate")
            if path in owners:
                raise ConfigError(
                    f"The answers of {name!r} to {task.name} and those of {owners[path]} would be one file, {path}. "
                    "Give the models other names: NAME=FOLDER."
                )
            owners[path] = f"{name!r} to {task.name}"


def _check_folder(out: Path) -> None:
    """Raises a DataError when nothing can be written to `out`, or it is no folder of evaluations."""
    try:
        check_kind(out, "evaluation")
    except OSError as error:
        raise _unwritable(out, error) from error


def _unwritable(out: Path, error: OSError) -> DataError:
    """Returns what the user is told of a folder that cannot be written."""
    return DataError(
        f"Nothing can be written to {out}: {error.strerror or error}. Give another --out."
    )


@contextlib.contextmanager
def _only_writer(out: Path, world: World) -> Iterator[None]:
    """Holds the folder for this evaluation; the lock goes with rank 0's process, however it ends.

    Two that write at once would take each other's answers for their own.

    Raises:
        DataError: When the folder cannot be written, is no evaluation's, or another process holds
            it.
    """
    with contextlib.ExitStack() as held:

        def hold() -> None:
            if world.rank != 0:
                return
            taken = f"Another evaluation writes to {out}. Wait for it, or give another --out."
            try:
                held.enter_context(claim_folder(out, "evaluation", taken=taken))
            except OSError as error:
                raise _unwritable(out, error) from error

        gather_or_raise(hold)
        yield


@contextlib.contextmanager
def _reporting_failure(task: str, failed: list[FailedTask], *, alone: bool) -> Iterator[None]:
    """Adds what goes wrong inside to `failed`, unless it ends the ranks' work together.

    An error of this library or of the system is raised on all ranks alike; another one may be one
    rank's only.
    """
    try:
        yield
    except DistributedError:
        raise
    except Exception as error:
        if not alone and not isinstance(error, MoEError | OSError):
            raise
        kind = "" if isinstance(error, MoEError) else f"{type(error).__name__}: "
        failed.append(FailedTask(task, f"{kind}{error}"))
