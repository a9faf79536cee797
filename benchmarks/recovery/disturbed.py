"""Ranks of a small run that are killed, stopped and started again, and the results of their runs.

The processes are forked from a server that has imported the library, so that a start takes a
second. `kill -9` ends such a process as it ends any other.
"""

import hashlib
import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from benchmarks.recovery import small_run
from moe.cli import run_main
from moe.opening import open_to_write
from moe.parsing import read_json_lines
from moe.training.metrics import METRICS_FILE

RAISE = signal.SIGUSR1
"""Signal at which a rank raises an error that nobody expects."""

FILL_DISK = signal.SIGUSR2
"""Signal from which on a rank can write no more, as on a full disk."""

_POLL = 0.01  # seconds
_FULL = 1024  # bytes of a file that still find room


@cache
def _server() -> ForkServerContext:
    multiprocessing.set_forkserver_preload(["benchmarks.recovery.small_run"])
    return multiprocessing.get_context("forkserver")


class Launch:
    """The ranks that one launch of a small run starts.

    Args:
        arguments: Of `benchmarks.recovery.small_run`.
        num_ranks: Processes.
        log: File to which they append their output.
    """

    def __init__(self, arguments: Sequence[str], log: Path, *, num_ranks: int) -> None:
        self._processes: list[BaseProcess] = []
        variables = _meeting_place(num_ranks) if num_ranks > 1 else {}
        for rank in range(num_ranks):
            numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else {}
            process = _server().Process(
                target=_run, args=(list(arguments), log, {**variables, **numbers})
            )
            process.start()
            self._processes.append(process)

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        return len(self._processes)

    @property
    def is_running(self) -> bool:
        """Whether any rank is."""
        return any(process.is_alive() for process in self._processes)

    @property
    def exit_codes(self) -> list[int | None]:
        """Exit code of each rank; the negative of a signal that killed it, None while it runs."""
        return [process.exitcode for process in self._processes]

    def send(self, number: int, rank: int = 0) -> None:
        """Sends a signal to a rank that runs."""
        process = self._processes[rank]
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, number)

    def wait_until(self, is_reached: Callable[[], bool], timeout: float) -> bool:
        """Waits until a condition holds, all ranks have ended, or it takes too long."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if is_reached():
                return True
            if not self.is_running:
                return is_reached()
            time.sleep(_POLL)
        return False

    def wait(self, timeout: float) -> bool:
        """Waits for the end of all ranks, and returns whether it came in time."""
        return self.wait_until(lambda: not self.is_running, timeout)

    def end(self) -> None:
        """Kills all remaining ranks, stopped or not."""
        for rank, process in enumerate(self._processes):
            self.send(signal.SIGKILL, rank)
            process.join()


def _meeting_place(num_ranks: int) -> dict[str, str]:
    """Returns the variables that torchrun sets for all ranks."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    size = str(num_ranks)
    return {
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


def _run(arguments: list[str], log: Path, variables: dict[str, str]) -> None:
    """Runs a rank in its own process."""
    file = open_to_write(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(variables)
    torch.set_num_threads(1)
    signal.signal(RAISE, _raise)
    signal.signal(FILL_DISK, _fill_disk)
    sys.argv = ["benchmarks.recovery.small_run", *arguments]
    run_main(small_run.main)


def _raise(number: int, frame: FrameType | None) -> None:
    raise RuntimeError("this rank was told to raise")


def _fill_disk(number: int, frame: FrameType | None) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL, resource.RLIM_INFINITY))


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Returns the lines of a run's metrics; a torn last one is left out."""
    path = folder / METRICS_FILE
    if not path.exists():
        return []
    return [line for _, line in read_json_lines(path, torn_end=True)]


def last_step(folder: Path) -> int:
    """Returns the number of updates that a run has completed."""
    return max((line["step"] for line in read_lines(folder)), default=0)


def read_losses(folder: Path) -> dict[int, float]:
    """Returns the loss of each update of a run."""
    losses = {}
    for line in read_lines(folder):
        if "train/loss" in line:
            losses[line["step"]] = line["train/loss"]
    return losses


def hash_model(folder: Path) -> str:
    """Returns a hash of the weights of a run's final model; an empty text where there is none."""
    files = sorted((folder / "model").glob("*.safetensors"))
    content = hashlib.sha256()
    for file in files:
        content.update(file.read_bytes())
    return content.hexdigest() if files else ""
