"""A campaign of random faults over small runs: the damage, and its cost.

    python -m benchmarks.recovery.faults --faults 100 --json benchmarks/recovery/results/faults.json
    python -m benchmarks.recovery.faults --faults 100 --only kill --json benchmarks/recovery/results/kills.json

A rank is killed, stopped for a while, slowed down, raises, or finds its disk full, at a random moment
of a run on 1, 2 or 4 ranks. Runs that end are started again with `--resume`. In the end their losses and weights must
equal those of an undisturbed run bit for bit. An interrupted campaign can be resumed.
"""

import random
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.machine import describe_machine
from benchmarks.recovery.disturbed import (
    FILL_DISK,
    RAISE,
    Launch,
    hash_model,
    last_step,
    read_losses,
)
from benchmarks.report import save_report
from moe.checkpoint.integrity import checkpoint_folders, visible_damage
from moe.checks import check
from moe.cli import Parser, integer, path, run_main
from moe.errors import DistributedError
from moe.files import output_path
from moe.inspection.tables import format_table
from moe.parsing import read_json
from moe.training.run import CHECKPOINTS_FOLDER
from moe.training.timeline import read_timeline

MESHES = {1: (), 2: ("--mesh.ep=2",), 4: ("--mesh.ep=2", "--mesh.dp_shard=2")}
"""Settings of the mesh, by the number of ranks."""

_STEPS = 30
_FAULTS_OF_RUN = 5
_STEPS_BETWEEN = (1, 6)
_LONGEST_PAUSE = 0.6  # seconds after a step at which a fault may come
_LONGEST_STOP = 3.0  # seconds
_SLOW_PERIODS = 20
_SLOW_PERIOD = 0.05  # seconds
_PATIENCE = 60.0  # seconds in which ranks must notice that another is gone
_TIMEOUT = 900.0  # seconds in which a run must come to its end, on a busy machine too


# ---------------------------------------------------------------------------
# Faults


def stop_for_a_while(launch: Launch, rank: int, draw: random.Random) -> None:
    """Stops a rank, and lets it continue after some seconds."""
    launch.send(signal.SIGSTOP, rank)
    time.sleep(draw.uniform(0.5, _LONGEST_STOP))
    launch.send(signal.SIGCONT, rank)


def slow_down(launch: Launch, rank: int, draw: random.Random) -> None:
    """Limits a rank to half of the processor time, for some seconds."""
    for _ in range(_SLOW_PERIODS):
        launch.send(signal.SIGSTOP, rank)
        time.sleep(_SLOW_PERIOD)
        launch.send(signal.SIGCONT, rank)
        time.sleep(_SLOW_PERIOD)


def send_signal(number: int, launch: Launch, rank: int, draw: random.Random) -> None:
    """Sends a rank a signal by which its run ends."""
    launch.send(number, rank)


class FaultKind(NamedTuple):
    """A kind of fault.

    Attributes:
        inflict: Applies the fault to a rank.
        is_fatal: Whether the run ends by it, and is started again.
    """

    inflict: Callable[[Launch, int, random.Random], None]
    is_fatal: bool


FAULTS = {
    "kill": FaultKind(partial(send_signal, signal.SIGKILL), is_fatal=True),
    "raise": FaultKind(partial(send_signal, RAISE), is_fatal=True),
    "full disk": FaultKind(partial(send_signal, FILL_DISK), is_fatal=True),
    "stop": FaultKind(stop_for_a_while, is_fatal=False),
    "slow": FaultKind(slow_down, is_fatal=False),
}


class FaultRecord(NamedTuple):
    """A fault and its cost.

    Attributes:
        kind: Key of `FAULTS`.
        rank: Rank that it hit.
        step: Updates that the run had completed.
        lost_steps: Updates that were taken again.
        stall_seconds: Until the run had an update more than it ever had.
        damaged_checkpoints: Number of its checkpoints that were damaged.
    """

    kind: str
    rank: int
    step: int
    lost_steps: int
    stall_seconds: float
    damaged_checkpoints: int


class RunRecord(NamedTuple):
    """A run, and how it ended.

    Attributes:
        seed: Seed of all randomness.
        ranks: How many it had.
        faults: Faults that hit it.
        equal_losses: Whether every loss equals that of an undisturbed run bit for bit.
        equal_weights: Whether the final weights are.
    """

    seed: int
    ranks: int
    faults: list[FaultRecord]
    equal_losses: bool
    equal_weights: bool


class Reference(NamedTuple):
    """Results of an undisturbed run.

    Attributes:
        losses: Loss of each update.
        weights: Hash of the final weights.
    """

    losses: dict[int, float]
    weights: str


# ---------------------------------------------------------------------------
# Runs


def run_undisturbed(folder: Path, ranks: int) -> Reference:
    """Returns the results of an undisturbed run on this many ranks."""
    launch = _start(folder, ranks)
    try:
        _wait_for_end(launch, folder)
    finally:
        launch.end()
    return Reference(read_losses(folder), hash_model(folder))


def run_disturbed(
    folder: Path, ranks: int, seed: int, num_faults: int, kinds: Sequence[str], reference: Reference
) -> RunRecord:
    """Disturbs a run until it ends, and returns the results."""
    draw = random.Random(seed)
    launch = _start(folder, ranks)
    faults: list[FaultRecord] = []
    try:
        step = 0
        while len(faults) < num_faults:
            step = max(step, last_step(folder)) + draw.randint(*_STEPS_BETWEEN)
            kind = draw.choice(kinds)
            rank = draw.randrange(ranks)
            if not launch.wait_until(lambda step=step: last_step(folder) >= step, _TIMEOUT):
                break
            time.sleep(draw.uniform(0, _LONGEST_PAUSE))
            if not launch.is_running:
                break
            record, launch = _inflict(launch, folder, kind, rank, draw)
            faults.append(record)
        _wait_for_end(launch, folder)
    finally:
        launch.end()
    return RunRecord(
        seed=seed,
        ranks=ranks,
        faults=faults,
        equal_losses=read_losses(folder) == reference.losses,
        equal_weights=hash_model(folder) == reference.weights,
    )


def _inflict(
    launch: Launch, folder: Path, kind: str, rank: int, draw: random.Random
) -> tuple[FaultRecord, Launch]:
    """Disturbs a rank, waits until the run continues, and returns the launch in which it does."""
    started = time.monotonic()
    FAULTS[kind].inflict(launch, rank, draw)

    # All ranks end; one that waits for another without noticing is killed, as torchrun does.
    num_ranks = launch.num_ranks
    damaged = 0
    starts = _starts(folder)
    if FAULTS[kind].is_fatal:
        launch.wait(_PATIENCE)
        launch.end()
        damaged = _count_damaged(folder)
    step = last_step(folder)
    if FAULTS[kind].is_fatal:
        launch = _start(folder, num_ranks)
    launch.wait_until(lambda: last_step(folder) > step, _TIMEOUT)
    stall = time.monotonic() - started

    # The step at which it resumed.
    lost = 0
    for first_step in _starts(folder)[len(starts) :]:
        lost += step - first_step
    return FaultRecord(kind, rank, step, lost, round(stall, 2), damaged), launch


def _start(folder: Path, ranks: int) -> Launch:
    arguments = [
        *MESHES[ranks],
        f"--training.steps={_STEPS}",
        "--training.batch_size=8",
        "--training.checkpoint_every=4",
        "--timeout=30",
        "--resume",
        f"--out={folder}",
    ]
    return Launch(arguments, folder.with_suffix(".log"), num_ranks=ranks)


def _wait_for_end(launch: Launch, folder: Path) -> None:
    """Waits for the end of a run.

    Raises:
        DistributedError: When it fails, or takes too long.
    """
    launch.wait(_TIMEOUT)
    if set(launch.exit_codes) != {0}:
        log = folder.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
        raise DistributedError(
            f"A run did not finish (exit codes {launch.exit_codes}). Its log ends with: {log[-2000:]}"
        )


def _starts(folder: Path) -> list[int]:
    """Returns the step at which each process of a run began."""
    if last_step(folder) == 0:
        return []
    return [event.step for event in read_timeline(folder) if event.event == "start"]


def _count_damaged(folder: Path) -> int:
    """Returns how many checkpoints in a run's folder are incomplete."""
    damaged = [visible_damage(path) for path in checkpoint_folders(folder / CHECKPOINTS_FOLDER)]
    return sum(damage is not None for damage in damaged)


# ---------------------------------------------------------------------------
# The campaign


class Campaign:
    """Runs that are disturbed, and a report that is saved after each.

    Args:
        target: JSON file of the report; None for none.
        command: Command line that gives the same campaign.
    """

    def __init__(self, target: Path | None, command: str) -> None:
        self._target = target
        self._command = command
        self.records: list[RunRecord] = []
        if target is not None and target.exists():
            self._read(target)

    @property
    def num_faults(self) -> int:
        """Faults so far."""
        return sum(len(record.faults) for record in self.records)

    def add(self, record: RunRecord) -> None:
        """Adds a run, and saves the report."""
        self.records.append(record)
        runs = []
        for run in self.records:
            runs.append({**run._asdict(), "faults": [fault._asdict() for fault in run.faults]})
        report = {**describe_machine(torch.device("cpu")), "command": self._command, "runs": runs}
        save_report(report, self._target)

    def _read(self, target: Path) -> None:
        report = read_json(target)
        same = report.get("command") == self._command
        expected = f"a file of the same campaign, {self._command}; give another, or remove it"
        check(same, "--json", str(target), expected)
        for run in report["runs"]:
            faults = [FaultRecord(**fault) for fault in run["faults"]]
            self.records.append(RunRecord(**{**run, "faults": faults}))


def campaign_table(records: Sequence[RunRecord]) -> str:
    """Returns a row for each number of ranks and each kind of fault."""
    by_row: Mapping[tuple[int, str], list[tuple[RunRecord, FaultRecord]]] = defaultdict(list)
    for record in records:
        for fault in record.faults:
            by_row[record.ranks, fault.kind].append((record, fault))

    rows = []
    for (ranks, kind), entries in sorted(by_row.items()):
        lost = [fault.lost_steps for _, fault in entries]
        stalls = [fault.stall_seconds for _, fault in entries]
        equal = [run.equal_losses and run.equal_weights for run, _ in entries]
        damaged = sum(fault.damaged_checkpoints for _, fault in entries)
        number = len(entries)
        rows.append(
            [
                str(ranks),
                kind,
                str(number),
                f"{sum(lost) / number:.1f}",
                str(max(lost)),
                f"{sum(stalls) / number:.1f}",
                str(damaged),
                f"{sum(equal)} of {number}",
            ]
        )
    header = [
        "ranks",
        "fault",
        "number",
        "lost steps",
        "most",
        "stall s",
        "damaged",
        "bit-identical",
    ]
    return format_table(header, rows)


def main(argv: list[str]) -> None:
    """Runs the campaign, prints its table and saves it."""
    parser = Parser(
        prog="python -m benchmarks.recovery.faults", description="Disturbs runs at random."
    )
    parser.add_argument("--faults", type=integer(least=1, most=10_000), default=50)
    parser.add_argument("--only", choices=list(FAULTS), help="one kind of fault; all by default")
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        choices=MESHES,
        default=[1, 2, 4],
        help="numbers of ranks, in turn",
    )
    parser.add_argument("--seed", type=integer(least=0, most=2**31), default=0)
    parser.add_argument("--json", type=path, help="file to write, and to resume from")
    options = parser.parse_args(argv)
    target = None
    if options.json is not None:
        target = output_path(options.json, suffix=".json", option="--json")

    # Two campaigns are the same if these agree; their lengths may differ.
    command = f"python -m benchmarks.recovery.faults --seed {options.seed} --ranks " + " ".join(
        str(ranks) for ranks in options.ranks
    )
    kinds = list(FAULTS)
    if options.only is not None:
        command += f" --only '{options.only}'"
        kinds = [options.only]

    campaign = Campaign(target, command)
    with tempfile.TemporaryDirectory() as name:
        disturb_runs(campaign, Path(name), options.faults, options.ranks, options.seed, kinds)
    print(campaign_table(campaign.records))


def disturb_runs(
    campaign: Campaign,
    folder: Path,
    num_faults: int,
    ranks_in_turn: Sequence[int],
    seed: int,
    kinds: Sequence[str],
) -> None:
    """Adds runs to a campaign until it has so many faults."""
    references: dict[int, Reference] = {}
    while campaign.num_faults < num_faults:
        number = len(campaign.records)
        ranks = ranks_in_turn[number % len(ranks_in_turn)]
        if ranks not in references:
            references[ranks] = run_undisturbed(folder / f"undisturbed-{ranks}", ranks)

        left = min(_FAULTS_OF_RUN, num_faults - campaign.num_faults)
        run_seed = seed * 100_003 + number
        record = run_disturbed(
            folder / f"run-{number}", ranks, run_seed, left, kinds, references[ranks]
        )
        campaign.add(record)
        _print_progress(campaign, record, num_faults)


def _print_progress(campaign: Campaign, record: RunRecord, num_faults: int) -> None:
    kinds: dict[str, Any] = defaultdict(int)
    for fault in record.faults:
        kinds[fault.kind] += 1
    happened = ", ".join(f"{number} {kind}" for kind, number in kinds.items()) or "nothing"
    is_equal = record.equal_losses and record.equal_weights
    end = "as if undisturbed" if is_equal else "NOT as if undisturbed"
    print(
        f"{campaign.num_faults}/{num_faults}: {record.ranks} ranks, {happened}: {end}", flush=True
    )


if __name__ == "__main__":
    run_main(main)
