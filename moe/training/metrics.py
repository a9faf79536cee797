"""The metrics of a run: one JSON object per line in metrics.jsonl, and the same for TensorBoard."""

from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from moe.checks import is_kind, shown
from moe.errors import DataError
from moe.json_lines import JsonLines
from moe.parsing import read_json_lines
from moe.sparse.stats import RouterStats
from moe.training.router_health import router_values
from moe.training.step import StepMetrics

METRICS_FILE = "metrics.jsonl"


def step_values(metrics: StepMetrics, tokens_per_second: float) -> dict[str, float]:
    """Returns the numbers of one update under their names in logs.

    Args:
        metrics: Result of `take_step`.
        tokens_per_second: Over the steps since the last log.
    """
    values = {
        "train/loss": float(metrics.loss),
        "train/ce_loss": float(metrics.ce_loss),
        "train/grad_norm": float(metrics.grad_norm),
        "train/lr": metrics.lr,
        "train/tokens_per_second": tokens_per_second,
    }

    # A dense stack has no routers to report on.
    for stack, stats in (("encoder", metrics.encoder_stats), ("decoder", metrics.decoder_stats)):
        if stats is not None:
            values.update(router_values(stack, stats))
    if metrics.layer_stats:
        for name, value in RouterStats.max_violations(metrics.layer_stats).items():
            values[f"router/{name}"] = value
    return values


def last_value(path: Path, name: str) -> float | None:
    """Returns the last number with this name in a metrics.jsonl; None if there is none."""
    value = None
    for _, line in read_json_lines(path, torn_end=True):
        value = line.get(name, value)
    return value


class MetricsWriter:
    """Appends to metrics.jsonl and to TensorBoard's files.

    Args:
        folder: Folder of the run.
        step: Updates so far; lines of later ones, and an incomplete last line, are removed.

    Raises:
        DataError: When another line is torn or has no step; names file and line.
        OSError: When the disk is full or fails; names the file.
    """

    def __init__(self, folder: Path, step: int) -> None:
        path = folder / METRICS_FILE
        earlier = _lines_until(path, step) if step and path.exists() else []
        self._lines = JsonLines(path, earlier)

        # TensorBoard discards what a killed run has written after this step.
        purge_step = step + 1 if step else None
        self._board = SummaryWriter(folder / "tensorboard", purge_step=purge_step)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes the numbers that were measured after `step` updates."""
        self._lines.append({"step": step, **values})
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()

    def close(self) -> None:
        """Closes TensorBoard's file."""
        self._board.close()


def _lines_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl that were measured after at most `step` updates."""
    lines = []
    for number, line in read_json_lines(path, torn_end=True):
        line_step: Any = line.get("step")
        if not is_kind(line_step, int) or line_step < 0:
            raise DataError(
                f"{path}, line {number} has no step (it is {shown(line_step)}). Restore the file, or remove that line."
            )

        # Later lines are of steps that will be repeated.
        if line_step <= step:
            lines.append(line)
    return lines
