"""An evaluation from end to end: models and tasks in, report files out."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.answers.batches import Request
from eval.answers.data_ranks import SINGLE_PROCESS, arrange_ranks
from eval.answers.likelihood import Scoring
from eval.answers.predict import MODES, Predicted, modes_of, predict
from eval.answers.seq2seq import Seq2Seq, load_seq2seq
from eval.baselines import baseline_outputs, has_baselines
from eval.reports.describe import by_class, input_lengths, notes_of, score_row, task_score, worst
from eval.reports.published import SUPERGLUE
from eval.reports.report import describe_model, describe_place, write_reports
from eval.reports.scoreboard import published_of
from eval.run_folder import (
    covers,
    drop_aside,
    entry_of,
    predictions_path,
    results_of,
    set_aside,
    write_examples,
)
from eval.scores.intervals import with_interval
from eval.source import BuiltIn
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

Draws = dict[tuple[str, str, str], NDArray[np.float64]]
"""By system, mode and task <float64>[R]: what the task adds to an average, of each draw."""


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
) -> dict[str, Any] | None:
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
    report: dict[str, Any] = {
        "command": command,
        "settings": {
            "tasks": [task.name for task in chosen],
            "modes": modes and list(modes),
            "split": split,
            "limit": limit,
            "data": data and str(data),
            "revision": revision,
            "scoring": vars(scoring),
            "ranks": world.size,
            "ep": ep,
            "tp": tp,
        },
        **describe_place(),
        "models": {name: describe_model(models[name], system) for name, system in systems.items()},
        "tasks": [],
        "averages": [],
        "failed": [],
        "earlier": None,
    }
    draws: Draws = {}
    with _only_writer(out, world):
        for task in chosen:
            where = split or task.split
            with _reporting_failure(task.name, report["failed"], alone=world.size == 1):
                entry, examples = read_task(task, where, limit, data, revision)
                answers = _answers(systems, task, examples, modes, scoring, out)
                if world.rank == 0:
                    entry |= write_examples(out, task, examples)
                    report["tasks"].append(
                        _scored(entry, task, examples, answers, systems, report["models"], draws)
                    )
            if world.rank == 0:
                report["averages"] = _averages(report["tasks"], draws)
                _write(report, out, last=task is chosen[-1])
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
) -> tuple[dict[str, Any], list[Example]]:
    """Returns what the report says of a task before any answer, and its examples.

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
    entry = {
        "task": task.name,
        "version": task.version,
        "description": task.description,
        "licence": task.licence,
        "prompt_source": task.prompt_source,
        "variant_of": task.variant_of,
        "split": split,
        "limit": limit if len(examples) < len(every) else None,
        "data": {
            "folder": folder and str(folder / (task.variant_of or task.name)),
            "repository": getattr(task.source, "repository", None),
            "config": getattr(task.source, "config", None),
            "split": getattr(task.source, "hub_splits", {}).get(split, split),
            "revision": revision
            or (None if built_in else " or ".join(getattr(task.source, "revisions", ()))),
        },
        "num_rows": len(read),
        "num_expected": task.source.expected(split),
        "num_available": len(every),
        "num_examples": len(examples),
        "num_groups": len({example.group for example in examples}),
        "decoding": task.decoding._asdict(),
    }
    return entry, examples


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


def _scored(
    entry: dict[str, Any],
    task: Task,
    examples: list[Example],
    answers: dict[tuple[str, str], Predicted],
    systems: Mapping[str, Seq2Seq],
    models: Mapping[str, dict[str, Any]],
    draws: Draws,
) -> dict[str, Any]:
    """Returns the entry of a task with all scores; classes and worst answers are those of the first
    model and mode.
    """
    rows, judged = [], []
    for (name, mode), made in answers.items():
        outputs = [prediction.output for prediction in made.predictions]
        row, drawn, each = score_row(task, examples, outputs, name, mode, _router_fields(made))
        rows.append(row)
        judged.append((outputs, each))
        draws[name, mode, task.name] = task_score(task.name, list(drawn.values()))
    if isinstance(task.source, BuiltIn) and has_baselines(task):
        for name, outputs in baseline_outputs(task, task.examples("train"), examples).items():
            rows.append(score_row(task, examples, outputs, name, "baseline")[0])
    outputs, each = judged[0]
    entry["systems"] = rows
    entry["inputs"] = input_lengths(
        examples, next(iter(systems.values())).tokenizer, task.inputs_length
    )
    entry["published"] = [
        {"own_metric": metric.name, **one._asdict()}
        for metric in task.metrics
        for one in published_of(entry, metric.name)
    ]
    entry["by_class"] = by_class(task, examples, outputs)
    entry["worst"] = worst(examples, outputs, each)
    entry["notes"] = notes_of(entry, models)
    return entry


def _router_fields(made: Predicted) -> dict[str, Any] | None:
    """Returns what the routers did as JSON holds it; None for a dense model."""
    if made.router is None:
        return None
    return {stack: summary._asdict() for stack, summary in made.router.items()}


def _averages(tasks: Sequence[dict[str, Any]], draws: Draws) -> list[dict[str, Any]]:
    """Returns the SuperGLUE average of every system and mode that all its tasks were answered in."""
    rows = {
        (row["name"], row["mode"], task["task"]): row
        for task in tasks
        for row in task["systems"]
        if row["mode"] in MODES
    }
    averages = []
    for name, mode in dict.fromkeys(key[:2] for key in rows):
        keys = [(name, mode, task) for task in SUPERGLUE]
        if not all(key in rows for key in keys):
            continue
        values = [task_score(key[2], [one["value"] for one in rows[key]["scores"]]) for key in keys]
        drawn = [draws[key] for key in keys]
        # A task of one group has no draws: the average then has no interval either.
        spread = np.mean(drawn, axis=0) if all(len(one) for one in drawn) else np.empty(0)
        average = with_interval(float(np.mean(values)), spread)
        averages.append({"average": "superglue", "name": name, "mode": mode, **average._asdict()})
    return averages


def _write(report: dict[str, Any], out: Path, *, last: bool) -> None:
    """Writes the reports; what an earlier one of the folder knows beyond this one stays in a copy.

    Args:
        report: Its `earlier` becomes the name of the copy, or None.
        out: The folder.
        last: Whether there is no further task.
    """
    fingerprints = {name: model["fingerprint"] for name, model in report["models"].items()}
    entries = [
        entry_of(task, f"task {number}") for number, task in enumerate(report["tasks"], start=1)
    ]
    results = results_of(fingerprints, entries)

    if report["earlier"] is None:
        copy = set_aside(out, results)
        report["earlier"] = copy and copy.name
    copy = report["earlier"]
    if last and copy is not None and covers(out / copy, results):
        report["earlier"] = None
    write_reports(report, out)
    if copy is not None and report["earlier"] is None:
        drop_aside(out / copy)


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
def _reporting_failure(task: str, failed: list[dict[str, str]], *, alone: bool) -> Iterator[None]:
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
        failed.append({"task": task, "message": f"{kind}{error}"})
