"""The metrics of a run: one JSON object per line in metrics.jsonl, and the same for TensorBoard."""

import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from moe.checks import is_kind, shown
from moe.distributed.replica_groups import ReplicaSeconds
from moe.errors import DataError
from moe.files import write_text
from moe.opening import open_to_write
from moe.parsing import read_json_lines
from moe.sparse.stats import RouterStats
from moe.training.router_health import router_values
from moe.training.step import StepMetrics

METRICS_FILE = "metrics.jsonl"


def step_values(
    metrics: StepMetrics, tokens_per_second: float, data_wait: float
) -> dict[str, float]:
    """Returns the numbers of one update under their names in logs.

    Args:
        metrics: Result of `take_step`.
        tokens_per_second: Over the steps since the last log.
        data_wait: Seconds for which one of these steps waited for its batch, on average.
    """
    values = {
        "train/loss": float(metrics.loss),
        "train/ce_loss": float(metrics.ce_loss),
        "train/grad_norm": float(metrics.grad_norm),
        "train/lr": metrics.lr,
        "train/tokens_per_second": tokens_per_second,
        "train/data_wait_seconds": data_wait,
    }

    # A dense stack has no routers to report on.
    for stack, stats in (("encoder", metrics.encoder_stats), ("decoder", metrics.decoder_stats)):
        if stats is not None:
            values.update(router_values(stack, stats))
    if metrics.layer_stats:
        for name, value in RouterStats.max_violations(metrics.layer_stats).items():
            values[f"router/{name}"] = value
    return values


def replica_values(seconds: ReplicaSeconds) -> dict[str, float]:
    """Returns the cost of lost replica groups under its names in logs."""
    return {
        "replicas/live": seconds.live,
        "replicas/meeting_seconds": seconds.meeting,
        "replicas/healing_seconds": seconds.healing,
        "replicas/lost_seconds": seconds.lost,
        "replicas/lost_steps": seconds.lost_steps,
        "replicas/healed": seconds.healed,
    }


def last_value(path: Path, name: str) -> float | None:
    """Returns the last number with this name in a metrics.jsonl; None if there is none."""
    value = None
    for _, line in read_json_lines(path, torn_end=True, nan=True):
        value = line.get(name, value)
    return value


class MetricsWriter:
    """Appends to metrics.jsonl and to TensorBoard's files; a context manager.

    Args:
        folder: Folder of the run.
        step: Updates so far; lines of later ones, and an incomplete last line, are removed.

    Raises:
        DataError: When another line is torn or has no step; names file and line.
        OSError: When the disk is full or fails; names the file.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._lines = _open_lines(folder / METRICS_FILE, step)

        # TensorBoard discards what a killed run has written after this step.
        purge_step = step + 1 if step else None
        self._board = _Board(folder / "tensorboard", purge_step=purge_step)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes the numbers that were measured after `step` updates."""
        line = json.dumps({"step": step, **values}) + "\n"
        self._lines.write(line.encode())
        self._board.write(step, values)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lines.close()
        self._board.close()


def _open_lines(path: Path, step: int) -> "_GrowingFile":
    """Returns a file of lines; lines of an earlier run until `step` stay."""
    earlier = _lines_until(path, step) if step and path.exists() else []
    write_text(path, "".join(json.dumps(line) + "\n" for line in earlier))
    return _GrowingFile(path)


def _lines_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl that were measured after at most `step` updates."""
    lines = []
    for number, line in read_json_lines(path, torn_end=True, nan=True):
        line_step: Any = line.get("step")
        if not is_kind(line_step, int) or line_step < 0:
            raise DataError(
                f"{path}, line {number} has no step (it is {shown(line_step)}). Restore the file, or remove that line."
            )

        # Later lines are of steps that will be repeated.
        if line_step <= step:
            lines.append(line)
    return lines


class _Board:
    """A file of events for TensorBoard; every write has reached the file when it returns.

    TensorBoard's own writer is a thread: on a full disk it prints a traceback between the lines of a run, and the run
    detects the failure late or never.

    Args:
        folder: Folder of the file.
        purge_step: Step from which TensorBoard discards earlier files; None for none.
    """

    def __init__(self, folder: Path, *, purge_step: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # The name starts as TensorBoard expects, and is unique to the process.
        process = f"{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = _GrowingFile(folder / f"events.out.tfevents.{int(time.time()):010d}.{process}")
        self._records = RecordWriter(self._file)

        self._add(Event(file_version="brain.Event:2"))
        if purge_step is not None:
            self._add(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, values: dict[str, float]) -> None:
        """Appends the numbers of a step."""
        entries = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(Event(step=step, summary=Summary(value=entries)))

    def close(self) -> None:
        """Ends the file."""
        self._file.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())


class _GrowingFile:
    """A file whose writes are complete when they return, or raise an OSError with its name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "ab", buffering=0, opener=open_to_write)  # noqa: SIM115

    def write(self, data: bytes) -> None:
        """Appends all of `data`."""
        # An unbuffered file may write only a part.
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
