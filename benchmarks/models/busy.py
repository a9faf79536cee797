"""The benchmark of a busy machine: a training step and decoding while other processes use the
cores.

One worker waits as commands of ours do, another sleeps at once, a third waits as threads do by
default; see stmoe.py. They work in turn, on an idle machine and then next to one busy process per
core, round by round.
"""

import dataclasses
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.machine import Columns, describe_machine, print_report, report_text, save_report
from benchmarks.models.busy_work import PARTS, worker_arguments
from benchmarks.models.model import ModelCase
from benchmarks.timing import median_ratio
from moe.errors import MoEError
from stmoe import SPIN_COUNT, WAIT_POLICIES

POLICIES: Mapping[str, Mapping[str, str]] = {
    "ours": {"GOMP_SPINCOUNT": str(SPIN_COUNT)},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "default": {},
}
SMALL = ModelCase(
    vocab_size=8000,
    d_model=256,
    d_ff=1024,
    num_heads=4,
    num_layers=4,
    sparse_layers=2,
    batch=16,
    input_length=128,
    target_length=32,
    new_tokens=32,
)
_BUSY = "while True: pass"

Times = dict[tuple[str, str, str], float]
"""Milliseconds of one round by part, policy, and `alone` or `busy`."""


@dataclass(frozen=True)
class BusyBenchmark:
    """What to measure; the fields are the command's options.

    Attributes:
        rounds: How often everything is measured; results are medians.
        threads: Threads of a worker, and busy processes next to it.
        json: File to save to; None for none.
        case: Sizes of the model.
    """

    rounds: int
    threads: int
    json: Path | None
    case: ModelCase = field(default_factory=lambda: SMALL)


def run_busy(benchmark: BusyBenchmark) -> None:
    """Measures, prints the table and saves it."""
    report: dict[str, Any] = {
        **describe_machine(torch.device("cpu")),
        "threads": benchmark.threads,
        "rounds": benchmark.rounds,
        "case": dataclasses.asdict(benchmark.case),
    }

    # Saved before anything is measured: a path that cannot be written is known at once.
    save_report(report, benchmark.json)
    rounds = measure_rounds(benchmark)
    report["rows"] = describe_rows(list(tqdm(rounds, total=benchmark.rounds, unit="round")))
    save_report(report, benchmark.json)

    print_report(format_report(report), benchmark.json)


def measure_rounds(benchmark: BusyBenchmark) -> Iterator[Times]:
    """Yields the times of every part and worker, alone and next to busy processes."""
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for policy, variables in POLICIES.items():
            worker = start_worker(benchmark, variables)
            workers[policy] = stack.enter_context(worker)

        for _ in range(benchmark.rounds):
            times = measure_parts(workers, "alone")
            with busy_processes(benchmark.threads):
                times |= measure_parts(workers, "busy")
            yield times


def measure_parts(workers: Mapping[str, "Worker"], machine: str) -> Times:
    """Returns the time of every part on every worker, one after the other."""
    times: Times = {}
    for part in PARTS:
        for policy, worker in workers.items():
            times[part, policy, machine] = worker.measure(part)
    return times


class Worker:
    """A process of benchmarks/models/busy_work.py; it works when asked, and waits for the next part."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def measure(self, part: str) -> float:
        """Returns the milliseconds that a part takes."""
        assert self._process.stdin is not None, "it was started with a pipe"
        self._process.stdin.write(f"{part}\n")
        self._process.stdin.flush()
        return float(self.read())

    def read(self) -> str:
        """Returns the next line that the process writes.

        Raises:
            MoEError: When it ended.
        """
        assert self._process.stdout is not None, "it was started with a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise MoEError(
                f"The process that was measured ended with code {self._process.wait()}; see its message above. If "
                "there is none, it was killed, perhaps because it used too much memory."
            )
        return line


@contextmanager
def start_worker(benchmark: BusyBenchmark, variables: Mapping[str, str]) -> Iterator[Worker]:
    """Yields a worker that is ready, with these environment variables instead of the user's policy."""
    environment = dict(os.environ) | dict(variables)
    for name in WAIT_POLICIES:
        if name not in variables:
            environment.pop(name, None)

    arguments = worker_arguments(benchmark.threads, benchmark.case)
    process = subprocess.Popen(
        arguments, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            worker = Worker(process)
            worker.read()
            yield worker
        finally:
            process.kill()


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Keeps this many unrelated processes busy."""
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


# ---- the report ----


def describe_rows(rounds: Sequence[Times]) -> list[dict[str, Any]]:
    """Returns a row for each part and policy, with ratios of times of the same round."""
    rows: list[dict[str, Any]] = []
    for part in PARTS:
        for policy in POLICIES:
            alone = [times[part, policy, "alone"] for times in rounds]
            busy = [times[part, policy, "busy"] for times in rounds]
            row = {
                "part": part,
                "policy": policy,
                "alone_ms": statistics.median(alone),
                "busy_ms": statistics.median(busy),
                "busy_over_alone": median_ratio(
                    rounds, (part, policy, "busy"), (part, policy, "alone")
                ),
                "alone_over_default": median_ratio(
                    rounds, (part, policy, "alone"), (part, "default", "alone")
                ),
            }
            rows.append(row)
    return rows


COLUMNS: Columns = (
    ("part", "part", ""),
    ("waiting", "policy", ""),
    ("alone ms", "alone_ms", ".0f"),
    ("busy ms", "busy_ms", ".0f"),
    ("busy / alone", "busy_over_alone", ".2f"),
    ("alone / default", "alone_over_default", ".2f"),
)


def format_report(report: Mapping[str, Any]) -> str:
    """Returns the report as text."""
    threads = f"{report['threads']} threads and as many busy processes"
    return report_text(report, threads, COLUMNS)
