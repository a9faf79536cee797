"""Starts the runs of a study: several at a time, within a budget of hours, and resumable.

Comes after `runs`, before `outcomes`, which reads the files of the runs.
"""

import json
import multiprocessing
import os
import re
import resource
import runpy
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from tqdm import tqdm

from moe.errors import DataError, DivergenceError, MoEError
from moe.files import locked_folder, write_text
from moe.opening import open_to_read, open_to_write
from moe.parsing import read_record
from moe.training.metrics import METRICS_FILE
from stmoe_eval.studies.runs import EVALUATION_FOLDER, StudyRun

STATE_FILE = "study_run.json"
LOG_FILE = "study_run.log"

_USAGE_FILE = "study_usage.json"
_POLL_SECONDS = 0.5
_PATIENCE_SECONDS = 60
_LONGEST_LINE = 2**14  # bytes
_STEP = re.compile(rb'^\{"step": (\d+),', re.MULTILINE)

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = ["moe.training.loop", "stmoe_eval.dev_scores", "stmoe_eval.run"]


class StudyError(MoEError, RuntimeError):
    """A run of a study failed for a reason other than divergence."""


class Budget(NamedTuple):
    """Resources of the runs.

    Attributes:
        jobs: Number of runs at a time.
        hours: A run that would probably exceed them is not started; None for no limit.
    """

    jobs: int = 1
    hours: float | None = None


class RunState(NamedTuple):
    """State of a run; study_run.json in the run's folder.

    Attributes:
        commands: Command lines of the run, without the interpreter.
        is_complete: Whether all of them have ended.
        has_diverged: Whether training ended because loss or gradient was not finite.
        seconds: Seconds of all attempts.
        cpu_seconds: Seconds of the processor in all attempts.
        threads: Threads of the last attempt, which decide the last bits of sums.
        settings: Digest of the settings (`StudyRun.settings`).
    """

    commands: list[list[str]]
    is_complete: bool = False
    has_diverged: bool = False
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    threads: int = 0
    settings: str = ""


@dataclass
class _Process:
    """A run in progress."""

    run: StudyRun
    remaining: list[list[str]]
    child: ForkServerProcess
    threads: int
    started: float
    earlier: RunState


@dataclass
class Progress:
    """Which runs are complete.

    Attributes:
        complete: Runs that are complete, diverged ones too.
        left_out: Runs that were not started, e.g. because the budget was too small.
    """

    complete: list[StudyRun] = field(default_factory=list)
    left_out: list[StudyRun] = field(default_factory=list)


def run_all(runs: Sequence[StudyRun], budget: Budget) -> None:
    """Runs all incomplete runs.

    Args:
        runs: The runs, in the order in which they begin.
        budget: How many at a time, and for how long.

    Raises:
        StudyError: When a command fails; its last lines are in the message, the others stop.
        KeyboardInterrupt: After the runs were told to stop; the next call resumes them.
    """
    # Complete runs are skipped.
    progress = find_progress(runs)
    waiting = list(progress.left_out)

    threads = max(1, len(os.sched_getaffinity(0)) // budget.jobs)

    # Continue until no run is waiting.
    end = None if budget.hours is None else time.monotonic() + 3600 * budget.hours
    running: list[_Process] = []
    total = sum(run.recipe.training.steps for run in runs)
    with _stopped_at_the_end(running), tqdm(total=total, unit="step", desc="study") as bar:
        while waiting or running:
            # Run as many runs at a time as there are jobs.
            while waiting and len(running) < budget.jobs:
                run = waiting.pop(0)
                if end is not None and not _fits(run, progress, running, end):
                    bar.write(f"left out, the budget would not suffice: {run.name}")
                    continue
                running.append(_begin(run, threads))

            # A finished command frees a slot for the next.
            time.sleep(_POLL_SECONDS)
            for process in list(running):
                if _has_ended(process):
                    running.remove(process)
                    progress.complete.append(process.run)
            _show(bar, progress, running)


def find_progress(runs: Sequence[StudyRun]) -> Progress:
    """Returns which runs are complete; all others count as omitted."""
    progress = Progress()
    for run in runs:
        state = read_state(run)
        if state is not None and state.is_complete:
            progress.complete.append(run)
        else:
            progress.left_out.append(run)
    return progress


def read_state(run: StudyRun) -> RunState | None:
    """Returns the state of a run; None for one that never started.

    Raises:
        StudyError: When its folder holds a run with other settings.
    """
    path = run.folder / STATE_FILE
    if not path.exists():
        return None
    state = read_record(path, RunState, advice=f"Remove {run.folder} to run it again.")
    if state.settings != run.settings:
        raise StudyError(
            f"{run.folder} holds a run with other settings. Choose another --out, or remove the folder."
        )
    return state


def _without_interpreter(commands: Sequence[Sequence[str]]) -> list[list[str]]:
    # The path of Python depends on the machine.
    return [list(command[1:]) for command in commands]


# ---------------------------------------------------------------------------
# One run


def _begin(run: StudyRun, threads: int) -> _Process:
    """Starts the first command of a run."""
    commands = _without_interpreter(run.commands)
    state = read_state(run) or RunState(commands)
    state = state._replace(commands=commands, threads=threads, settings=run.settings)
    _wait_for_earlier(run)
    _write_state(run, state)
    child = _start(run, run.commands[0], threads)
    return _Process(run, run.commands[1:], child, threads, time.monotonic(), state)


def _wait_for_earlier(run: StudyRun) -> None:
    """Waits until the process of a killed study has released the run's folder."""
    in_use = f"Another process works in {run.folder}. Wait for it, or choose another --out."
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            with locked_folder(run.folder, in_use):
                return
        except DataError:
            if time.monotonic() > end:
                raise
            time.sleep(_POLL_SECONDS)


def _start(run: StudyRun, command: Sequence[str], threads: int) -> ForkServerProcess:
    """Starts a command, `-m MODULE ARGUMENTS`, whose output goes to the run's log."""
    return fork_process(_run_module, run.folder, list(command[2:]), threads)


def fork_process(target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Starts a function in a process that has already imported what training and evaluation need.

    Processes are forked from one server, which imports torch once for all of them; they run on the
    cores of this process, and end with it.
    """
    _CONTEXT.set_forkserver_preload(_PRELOADED)
    cores = os.sched_getaffinity(0)
    child = _CONTEXT.Process(target=_run_forked, args=(cores, target, arguments))
    child.start()
    return child


def _run_forked(cores: set[int], target: Callable[..., None], arguments: Sequence[Any]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.sched_setaffinity(0, cores)
    target(*arguments)


def _run_module(folder: Path, command: list[str], threads: int) -> None:
    """Runs a module as a program, in a process that has already imported its modules."""
    log = open_to_write(folder / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())

    torch.set_num_threads(threads)
    sys.argv = command
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    finally:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        write_text(folder / _USAGE_FILE, json.dumps(usage.ru_utime + usage.ru_stime))


def _end_with_parent() -> None:
    """Ends this process when the one that started it is killed, so that no run is left behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "another process has started this one"
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _has_ended(process: _Process) -> bool:
    """Returns whether a run is complete; starts its next command when one has ended."""
    code = process.child.exitcode
    if code is None:
        return False

    # The time of a failed attempt counts too.
    run = process.run
    before = process.earlier
    has_diverged = code == DivergenceError.exit_code
    is_complete = has_diverged or (code == 0 and not process.remaining)
    state = RunState(
        before.commands,
        is_complete=is_complete,
        has_diverged=has_diverged,
        seconds=before.seconds + time.monotonic() - process.started,
        cpu_seconds=before.cpu_seconds + _cpu_seconds(run),
        threads=process.threads,
        settings=run.settings,
    )
    _write_state(run, state)
    if is_complete:
        return True
    if code != 0:
        raise StudyError(f"{run.name} failed with exit code {code}:\n{_last_lines(run)}")

    # Training is done: its evaluation follows.
    process.earlier = state
    process.started = time.monotonic()
    process.child = _start(run, process.remaining.pop(0), process.threads)
    return False


def _cpu_seconds(run: StudyRun) -> float:
    """Returns the CPU seconds of the finished command; 0 if it was killed."""
    path = run.folder / _USAGE_FILE
    if not path.exists():
        return 0.0
    seconds = read_record(path, float)
    path.unlink()
    return seconds


def _write_state(run: StudyRun, state: RunState) -> None:
    write_text(run.folder / STATE_FILE, json.dumps(state._asdict(), indent=1) + "\n")


def _last_lines(run: StudyRun) -> str:
    """Returns the end of a run's log."""
    text = (run.folder / LOG_FILE).read_text(encoding="utf-8", errors="replace")
    lines = text.replace("\r", "\n").strip().split("\n")
    return "\n".join(lines[-8:])


@contextmanager
def _stopped_at_the_end(running: Sequence[_Process]) -> Iterator[None]:
    """Stops all remaining runs when the block ends, even after an error."""
    try:
        yield
    finally:
        for process in running:
            process.child.terminate()
        for process in running:
            process.child.join()


# ---------------------------------------------------------------------------
# Budget and progress


def _fits(run: StudyRun, progress: Progress, running: Sequence[_Process], end: float) -> bool:
    """Returns whether a run will probably end in time, judged by those before it."""
    seconds = []
    for other in progress.complete:
        state = read_state(other)
        if state is not None and not state.has_diverged:
            seconds.append((other.arm, state.seconds / other.recipe.training.steps))

    # Until a run is complete, active runs report the speed of steps.
    for process in running:
        steps = steps_done(process.run)
        if steps:
            elapsed = time.monotonic() - process.started
            seconds.append((process.run.arm, elapsed / steps))

    # Runs of the same arm give the best estimate.
    of_arm = [value for arm, value in seconds if arm == run.arm]
    per_step = of_arm or [value for _, value in seconds]
    if not per_step:
        return time.monotonic() < end
    expected = statistics.median(per_step) * run.recipe.training.steps
    return time.monotonic() + expected <= end


def _show(bar: "tqdm[NoReturn]", progress: Progress, running: Sequence[_Process]) -> None:
    """Moves the progress bar to the steps that are done."""
    # Complete runs count in full, the others by the progress in their metrics.
    steps = sum(run.recipe.training.steps for run in progress.complete)
    for process in running:
        steps += steps_done(process.run)
    names = "; ".join(process.run.name for process in running)
    bar.n = steps
    bar.set_postfix_str(f"{len(progress.complete)} runs complete; {names}", refresh=True)


def steps_done(run: StudyRun) -> int:
    """Returns the last step in a run's metrics."""
    if (run.folder / EVALUATION_FOLDER).exists():
        return run.recipe.training.steps
    path = run.folder / METRICS_FILE
    if not path.exists():
        return 0

    # The end of the file alone, since this is called twice a second; its last line may be torn.
    with open(path, "rb", opener=open_to_read) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _LONGEST_LINE))
        steps = _STEP.findall(file.read())
    return int(steps[-1]) if steps else 0
