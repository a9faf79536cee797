"""Losses of replica groups in the middle of a run: the command that measures the table of live
losses.

    python -m benchmarks.recovery.live_losses --losses 30 --groups 3 --json benchmarks/recovery/results/live_losses.json

A group is killed by `kill -9` at a random moment and started again; the others continue, and it receives their state.
In the end all groups must have the same weights to the last bit, and, since the rows of a lost group are taken over,
the losses of a run in one process that nobody disturbed.
"""

import argparse
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.machine import describe_machine, save_report
from benchmarks.recovery.disturbed import Launch, hash_model, last_step, read_lines, read_losses
from moe.checks import check
from moe.cli import Parser, integer, run_main
from moe.distributed.replica_groups import GROUP_ID, LIGHTHOUSE
from moe.errors import DistributedError
from moe.files import output_path
from moe.inspection.tables import format_table

_STEPS_BETWEEN = (4, 9)
_STEPS_WITHOUT = (2, 6)
_LONGEST_PAUSE = 0.5  # seconds after a step at which a kill may come
_TIMEOUT = 900.0  # seconds in which something must happen, on a busy machine too
_HEARTBEAT_TIMEOUT = 2000  # milliseconds
_JOIN_TIMEOUT = 60_000


class Loss(NamedTuple):
    """A group that was killed and came back.

    Attributes:
        group: Its number.
        step: Updates that the run had completed.
        stall_seconds: From the kill to the next update of the others.
        steps_without: Updates of the others before it was started again.
        healed_step: Updates after which it continued.
        away_seconds: From the kill to its next update.
    """

    group: int
    step: int
    stall_seconds: float
    steps_without: int
    healed_step: int
    away_seconds: float


class Groups:
    """Replica groups of a small run on this machine.

    Args:
        folder: Receives a folder for each group.
        num_groups: How many.
        steps: Updates of the run.
        lighthouse: Address at which they meet.
    """

    def __init__(self, folder: Path, num_groups: int, steps: int, lighthouse: str) -> None:
        self._folder = folder
        self._lighthouse = lighthouse
        self._arguments = [
            "--float64",
            "--resume",
            "--timeout=120",
            f"--training.steps={steps}",
            f"--mesh.dp_replicate={num_groups}",
            "--mesh.on_lost_replica=constant_work",
        ]
        self._launches = [self._start(group) for group in range(num_groups)]

    def folder(self, group: int) -> Path:
        """Returns the folder of a group's run."""
        return self._folder / str(group)

    def lose(self, group: int, step: int, pause: float, steps_without: int) -> Loss | None:
        """Kills a group after a step, starts it again, and waits until it continues.

        Args:
            group: Which.
            step: Updates that all groups have completed before.
            pause: Seconds from there to the kill.
            steps_without: Updates of the others before it is started again.

        Returns:
            The outcome; None when the run ended before.
        """
        survivor = (group + 1) % len(self._launches)
        if not self._wait(group, lambda: last_step(self.folder(group)) >= step):
            return None
        time.sleep(pause)

        killed = time.monotonic()
        killed_step = last_step(self.folder(survivor))
        self._launches[group].send(signal.SIGKILL)
        self._launches[group].wait(_TIMEOUT)

        # The others continue.
        survivor_folder = self.folder(survivor)
        if not self._wait(survivor, lambda: last_step(survivor_folder) > killed_step + 1):
            return None
        stall = time.monotonic() - killed
        restart_step = killed_step + steps_without
        if not self._wait(survivor, lambda: last_step(survivor_folder) >= restart_step):
            return None
        self._launches[group] = self._start(group)

        # It continues from their step.
        if not self._wait(group, lambda: self._healed_step(group, killed_step) is not None):
            return None
        healed = self._healed_step(group, killed_step)
        assert healed is not None, "what was waited for"
        away = time.monotonic() - killed
        return Loss(group, killed_step, round(stall, 2), steps_without, healed, round(away, 2))

    def finish(self) -> None:
        """Waits for the end of all groups."""
        for group, launch in enumerate(self._launches):
            launch.wait(_TIMEOUT)
            if launch.exit_codes != [0]:
                raise DistributedError(self._what_happened(group))

    def end(self) -> None:
        """Kills what still runs."""
        for launch in self._launches:
            launch.end()

    def _start(self, group: int) -> Launch:
        environment = {LIGHTHOUSE: self._lighthouse, GROUP_ID: str(group)}
        arguments = [*self._arguments, f"--out={self.folder(group)}"]
        return Launch(arguments, self._log(group), environment=environment)

    def _wait(self, group: int, is_reached: Any) -> bool:
        """Waits for something of a group; returns whether it came before the end of its run."""
        launch = self._launches[group]
        if launch.wait_until(is_reached, _TIMEOUT):
            return True
        if launch.exit_codes == [0]:
            return False
        raise DistributedError(self._what_happened(group))

    def _healed_step(self, group: int, after: int) -> int | None:
        """Returns the first step after `after` at which a group was healed; None for none yet."""
        for line in read_lines(self.folder(group)):
            if line["step"] > after and line.get("replicas/healed"):
                return int(line["step"])
        return None

    def _log(self, group: int) -> Path:
        return self._folder / f"{group}.log"

    def _what_happened(self, group: int) -> str:
        said = self._log(group).read_text(encoding="utf-8", errors="replace")[-2000:]
        codes = self._launches[group].exit_codes
        return f"Replica group {group} ended or hangs (exit code {codes[0]}). It said: {said}"


def lose_groups(folder: Path, options: argparse.Namespace, lighthouse: str) -> list[Loss]:
    """Runs replica groups to their end, and kills them on the way."""
    draw = random.Random(options.seed)
    groups = Groups(folder, options.groups, options.steps, lighthouse)
    losses: list[Loss] = []
    try:
        step = 0
        while len(losses) < options.losses:
            step += draw.randint(*_STEPS_BETWEEN)
            group = draw.randrange(options.groups)
            pause = draw.uniform(0, _LONGEST_PAUSE)
            loss = groups.lose(group, step, pause, draw.randint(*_STEPS_WITHOUT))
            if loss is None:
                break
            losses.append(loss)
            print(_row(len(losses), loss), flush=True)
            step = loss.healed_step
        groups.finish()
    finally:
        groups.end()
    return losses


def run_alone(folder: Path, steps: int) -> dict[int, float]:
    """Returns the losses of the same run in one undisturbed process."""
    arguments = ["--float64", f"--training.steps={steps}", f"--out={folder}"]
    launch = Launch(arguments, folder.with_suffix(".log"))
    try:
        launch.wait(_TIMEOUT)
        assert launch.exit_codes == [0], folder.with_suffix(".log").read_text()
    finally:
        launch.end()
    return read_losses(folder)


def compare(folder: Path, num_groups: int, alone: dict[int, float]) -> dict[str, Any]:
    """Returns the differences of the groups from each other and from an undisturbed run."""
    hashes = {hash_model(folder / str(group)) for group in range(num_groups)}
    furthest = 0.0
    steps: set[int] = set()
    for group in range(num_groups):
        for step, loss in read_losses(folder / str(group)).items():
            furthest = max(furthest, abs(loss - alone[step]))
            steps.add(step)
    return {
        "replicas_bit_identical": len(hashes) == 1 and "" not in hashes,
        "steps_seen": len(steps),
        "largest_loss_difference": furthest,
    }


def main(argv: Sequence[str]) -> None:
    """Kills groups, compares, prints the table and saves it."""
    parser = Parser(
        prog="python -m benchmarks.recovery.live_losses", description="Kills replica groups."
    )
    parser.add_argument("--losses", type=integer(least=1, most=1000), default=30)
    parser.add_argument("--groups", type=integer(least=2, most=16), default=3)
    parser.add_argument("--steps", type=integer(least=10, most=100_000), default=1000)
    parser.add_argument("--seed", type=integer(least=0, most=2**31), default=0)
    parser.add_argument(
        "--json", help="file to write, e.g. benchmarks/recovery/results/live_losses.json"
    )
    options = parser.parse_args(argv)
    check(12 % options.groups == 0, "--groups", options.groups, "a divisor of the batch's 12 rows")
    target = output_path(options.json, suffix=".json", option="--json") if options.json else None

    # The lighthouse says a line of every step.
    os.environ.setdefault("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=_JOIN_TIMEOUT,
        heartbeat_timeout_ms=_HEARTBEAT_TIMEOUT,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            losses = lose_groups(folder, options, lighthouse.address())
        finally:
            lighthouse.shutdown()
        alone = run_alone(folder / "alone", options.steps)
        result = compare(folder, options.groups, alone)

    header = [
        "loss",
        "group",
        "after step",
        "others stall s",
        "steps without",
        "back at step",
        "away s",
    ]
    print(format_table(header, [_row(number, loss) for number, loss in enumerate(losses, 1)]))
    for key, value in result.items():
        print(f"{key}: {value}")
    report = {
        **describe_machine(torch.device("cpu")),
        "command": f"python -m benchmarks.recovery.live_losses --losses {options.losses} --groups "
        f"{options.groups} --steps {options.steps} --seed {options.seed}",
        "losses": [loss._asdict() for loss in losses],
        **result,
    }
    save_report(report, target)


def _row(number: int, loss: Loss) -> list[str]:
    return [str(number), *(str(value) for value in loss)]


if __name__ == "__main__":
    run_main(main)
