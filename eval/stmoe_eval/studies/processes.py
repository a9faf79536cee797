"""Runs commands of `stmoe` in processes of their own: those of a study, several at a time.

Comes after `study`, before `results`, which reads the files of the runs.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Collection, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch
from tqdm import tqdm

import stmoe
from moe.cli import CONTINUES, run_main
from moe.errors import MoEError
from moe.opening import open_to_write
from stmoe_eval.studies.study import StudyRun

LOG_FILE = "study_run.log"

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = ["moe.training.loop", "stmoe_eval.dev_scores", "stmoe_eval.run"]


class StudyError(MoEError, RuntimeError):
    """A command in a process of its own failed."""


def start_command(
    argv: Sequence[str], log: Path, *, cores: Collection[int], threads: int
) -> ForkServerProcess:
    """Starts a command of `stmoe` in a process that has already imported what it needs.

    Processes are forked from one server, which imports torch once for all of them. They end with
    this process.

    Args:
        argv: Verb and options.
        log: File that the output is appended to.
        cores: Cores that the process may use.
        threads: Threads of torch, which decide the last bits of sums.
    """
    _CONTEXT.set_forkserver_preload(_PRELOADED)
    child = _CONTEXT.Process(target=_run, args=(list(argv), log, set(cores), threads))
    child.start()
    return child


def _run(argv: list[str], log: Path, cores: set[int], threads: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)
    log.parent.mkdir(parents=True, exist_ok=True)
    file = open_to_write(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    sys.argv = ["stmoe", *argv]
    run_main(stmoe.main, interrupted=CONTINUES)


def _end_with_parent() -> None:
    """Ends this process when the one that started it is killed, so that no run is left behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "another process has started this one"
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def check_exit(child: ForkServerProcess, name: str, log: Path) -> None:
    """Raises a StudyError with the end of the output when a process that has ended has failed."""
    if child.exitcode:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise StudyError(f"{name} failed with exit code {child.exitcode}: {' '.join(lines[-3:])}")


def run_all(runs: Sequence[StudyRun], jobs: int) -> None:
    """Makes all runs that are not complete, and checks the settings of the others.

    Args:
        runs: The runs, in the order in which they begin.
        jobs: How many at a time; they share the processor's threads.

    Raises:
        StudyError: When a command fails; its last lines are in the message, the others stop.
        KeyboardInterrupt: After the runs were told to stop; the next call resumes them.
    """
    cores = os.sched_getaffinity(0)
    threads = max(1, len(cores) // jobs)
    waiting = list(runs)
    running: dict[str, tuple[StudyRun, ForkServerProcess]] = {}
    try:
        with tqdm(total=len(runs), unit="run", desc="study") as bar:
            while waiting or running:
                while waiting and len(running) < jobs:
                    run = waiting.pop(0)
                    log = run.folder / LOG_FILE
                    child = start_command(run.argv, log, cores=cores, threads=threads)
                    running[run.name] = (run, child)
                bar.set_postfix_str("; ".join(running))
                wait([child.sentinel for _, child in running.values()])

                # A process that has ended frees a slot for the next.
                for name, (run, child) in list(running.items()):
                    if not child.is_alive():
                        del running[name]
                        check_exit(child, name, run.folder / LOG_FILE)
                        bar.update()
    finally:
        for _, child in running.values():
            child.terminate()
        for _, child in running.values():
            child.join()
