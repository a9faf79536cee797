"""What a run reports: one JSON object a line in metrics.jsonl, and the same numbers for TensorBoard."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.utils.tensorboard import SummaryWriter

from moe.checks import is_kind
from moe.errors import DataError
from moe.files import whole_file
from moe.parsing import read_json_lines
from moe.sparse.stats import router_values
from moe.training.step import StepMetrics

METRICS_FILE = "metrics.jsonl"


def step_values(metrics: StepMetrics, tokens_per_second: float) -> dict[str, float]:
    """Returns the numbers of one update under their public names."""
    values = {
        "train/loss": float(metrics.loss),
        "train/ce_loss": float(metrics.ce_loss),
        "train/grad_norm": float(metrics.grad_norm),
        "train/lr": metrics.lr,
        "train/tokens_per_second": tokens_per_second,
    }
    for stack, stats in (("encoder", metrics.encoder_stats), ("decoder", metrics.decoder_stats)):
        if stats is not None:
            values.update(router_values(stack, stats))
    return values


def _lines_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl that were measured after at most `step` updates."""
    kept = []
    for number, line in read_json_lines(path, torn_end=True, nan=True):
        if not is_kind(line.get("step"), int):
            raise DataError(f"{path}, line {number} has no step. Restore the file, or remove that line.")
        if line["step"] <= step:
            kept.append(line)
    return kept


class MetricsWriter:
    """Appends to metrics.jsonl and to TensorBoard's files; a context manager.

    Args:
        folder: Of the run.
        step: Updates that the run has behind it; lines of later ones, and a torn last line, are removed.

    Raises:
        DataError: When another line is torn or has no step; names file and line.
    """

    def __init__(self, folder: Path, step: int) -> None:
        path = folder / METRICS_FILE
        kept = _lines_until(path, step) if step and path.exists() else []
        with whole_file(path) as partial:
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes the numbers that were measured after `step` updates."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._board.close()
