"""The benchmark of the start: CPU seconds and memory until a command explains its options.

Times are CPU times of the process (user and system), so that a busy machine changes little, and
relative to the import of torch and of transformers' T5, which every command must pay.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

import eval.__main__ as evaluation
import stmoe
from benchmarks.machine import Columns, describe_machine, print_report, report_text, save_report
from moe.errors import ConfigError, MoEError, did_you_mean

MOST = 1.3
"""Largest time of a command, over that of the imports that it must have."""

BASE = "torch and T5"
_IMPORTS = {
    BASE: ["-c", "import torch; from transformers import T5ForConditionalGeneration"],
    "import moe": ["-c", "import moe"],
}
_SCRIPTS = Path(__file__).parents[2] / "scripts"
_BYTES_OF_MAXRSS = 1 if sys.platform == "darwin" else 1024


class Start(NamedTuple):
    """Time and memory of a process.

    Attributes:
        cpu_seconds: User and system time.
        peak_mib: Most resident memory.
    """

    cpu_seconds: float
    peak_mib: float


@dataclass(frozen=True)
class StartupBenchmark:
    """What to measure; the fields are the command's options.

    Attributes:
        rounds: Number of repetitions; results are medians.
        json: File to save to; None for none.
        only: Names of starts; None for all.
    """

    rounds: int
    json: Path | None
    only: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Checks what argparse cannot.

        Raises:
            ConfigError: When a name is unknown.
        """
        known = starts()
        for name in self.only or ():
            if name not in known:
                raise ConfigError(
                    f"There is no start-up benchmark {name!r}.{did_you_mean(name, known)}"
                )


def starts() -> dict[str, list[str]]:
    """Returns the arguments of Python by name: the imports, and `--help` of every command."""
    arguments = dict(_IMPORTS)
    for path in sorted(_SCRIPTS.glob("*.py")):
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8"):
            arguments[f"scripts.{path.stem}"] = ["-m", f"scripts.{path.stem}", "--help"]

    # Commands of several verbs.
    arguments["benchmarks.network"] = ["-m", "benchmarks.network", "--help"]
    for verb in evaluation.VERBS:
        arguments[f"eval {verb}"] = ["-m", "eval", verb, "--help"]
    for verb in stmoe.VERBS:
        arguments[f"stmoe {verb}"] = ["-m", "stmoe", verb, "--help"]
    return arguments


def run_startup(benchmark: StartupBenchmark) -> None:
    """Measures, prints the table and saves it."""
    report: dict[str, Any] = {
        **describe_machine(torch.device("cpu")),
        "rounds": benchmark.rounds,
        "most": MOST,
    }
    save_report(report, benchmark.json)

    # One after the other, round by round.
    arguments = starts()
    names = [name for name in arguments if benchmark.only is None or name in benchmark.only]
    rounds: dict[str, list[Start]] = {name: [] for name in [BASE, *names]}
    with tqdm(total=benchmark.rounds * len(rounds), unit="start", mininterval=1.0) as bar:
        for _ in range(benchmark.rounds):
            for name, taken in rounds.items():
                bar.set_postfix_str(name)
                taken.append(measure_start(name, arguments[name]))
                bar.update()

    report["rows"] = describe_rows(rounds)
    save_report(report, benchmark.json)
    print_report(format_report(report), benchmark.json)


def measure_start(name: str, arguments: Sequence[str]) -> Start:
    """Returns the CPU time and peak memory of one process.

    Raises:
        MoEError: When it failed.
    """
    command = [sys.executable, *arguments]
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=nowhere, stderr=nowhere)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise MoEError(
            f"{name} ended with code {process.returncode}. Run it to see why: {' '.join(command)}"
        )

    peak = usage.ru_maxrss * _BYTES_OF_MAXRSS / 2**20
    return Start(usage.ru_utime + usage.ru_stime, peak)


def describe_rows(rounds: Mapping[str, Sequence[Start]]) -> list[dict[str, Any]]:
    """Returns a row for each start: medians, absolute and relative to the baseline."""
    medians: dict[str, Start] = {}
    for name, taken in rounds.items():
        seconds = statistics.median(start.cpu_seconds for start in taken)
        peak = statistics.median(start.peak_mib for start in taken)
        medians[name] = Start(seconds, peak)

    base = medians[BASE]
    rows: list[dict[str, Any]] = []
    for name, start in medians.items():
        row = {
            "start": name,
            **start._asdict(),
            "ratio": start.cpu_seconds / base.cpu_seconds,
            "memory_ratio": start.peak_mib / base.peak_mib,
        }
        rows.append(row)
    return rows


COLUMNS: Columns = (
    ("start", "start", ""),
    ("CPU s", "cpu_seconds", ".1f"),
    ("over the base", "ratio", ".2f"),
    ("peak MiB", "peak_mib", ".0f"),
    ("over the base", "memory_ratio", ".2f"),
    ("", "mark", ""),
)


def format_report(report: Mapping[str, Any]) -> str:
    """Returns the report as text; a start that takes too long is marked."""
    rows: list[dict[str, Any]] = []
    for row in report["rows"]:
        rows.append({**row, "mark": f"more than {MOST}" if row["ratio"] > MOST else ""})
    return report_text(report, "one process at a time", COLUMNS, rows)
