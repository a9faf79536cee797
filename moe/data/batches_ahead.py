"""Prepares batches ahead of the training steps, in worker processes.

Comes after `pipeline`. A batch is a function of the step, so every process makes the same one.
"""

import os
import signal
from collections.abc import Generator

import torch
from torch.utils.data import DataLoader, Dataset

from moe.checks import check_integer
from moe.data.pipeline import Batch, BatchSource

_CORES_FOR_A_WORKER = 4
_MOST_WORKERS_BY_DEFAULT = 4
_BATCHES_AHEAD = 2  # of each worker


def batches_ahead(
    source: BatchSource, rows: slice, steps: range, *, workers: int | None = None
) -> Generator[Batch, None, None]:
    """Yields the batch of every step, in order: the same ones for any number of workers.

    Close the iterator, or read it to its end: the workers end with it, as they do with this
    process, however that ends.

    Args:
        source: Makes batches; workers are forked with it, so it is not copied.
        rows: Rows of every batch to make.
        steps: Numbers of the batches.
        workers: Processes that make batches; 0 makes each batch in this process when it is needed.
            None for one per four cores of a rank on this machine, at most four.
    """
    if workers is None:
        workers = default_workers()
    if not workers:
        for step in steps:
            yield source.batch(step, rows)
        return

    yield from DataLoader(
        _Batches(source, rows),
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        prefetch_factor=_BATCHES_AHEAD,
        multiprocessing_context="fork",
        worker_init_fn=_leave_signals_to_the_run,
        # Workers need no seed; by default the loader draws one from torch's global generator.
        generator=torch.Generator(),
    )


def default_workers() -> int:
    """Returns the workers of a rank when a recipe does not say how many."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores_of_rank = len(os.sched_getaffinity(0)) // ranks_here
    return min(_MOST_WORKERS_BY_DEFAULT, cores_of_rank // _CORES_FOR_A_WORKER)


def check_workers(workers: int | None) -> None:
    """Raises a ConfigError when `data.workers` is not a number of processes."""
    cores = len(os.sched_getaffinity(0))
    check_integer(
        "data.workers",
        workers,
        least=0,
        most=cores,
        reason="the processor's cores",
        optional="null for a number by cores",
    )


class _Batches(Dataset[Batch]):
    """A source as torch's loader reads it: the i-th item is the batch of step i."""

    def __init__(self, source: BatchSource, rows: slice) -> None:
        self._source = source
        self._rows = rows

    def __getitem__(self, step: int) -> Batch:
        return self._source.batch(step, self._rows)


def _leave_signals_to_the_run(worker: int) -> None:
    """Ignores Ctrl-C in a worker: the run still needs the batches of its last step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
