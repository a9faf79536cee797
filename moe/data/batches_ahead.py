"""Prepares batches ahead of the training steps, in worker processes.

Comes after `pipeline`. A batch is a function of the step, so every process makes the same one.
"""

import os
import signal
from collections.abc import Generator

import torch
from torch.utils.data import DataLoader, Dataset

from moe.data.pipeline import Batch, BatchSource

_CORES_FOR_A_WORKER = 4
_MOST_WORKERS_BY_DEFAULT = 4
_BATCHES_AHEAD = 2  # of each worker


def batches_ahead(
    source: BatchSource, rows: slice, steps: range, *, workers: int
) -> Generator[Batch, None, None]:
    """Yields the batch of every step, in order: the same ones for any number of workers.

    Close the iterator, or read it to its end: the workers end with it, as they do with this
    process, however that ends.

    Args:
        source: Makes batches; workers are forked with it, so it is not copied.
        rows: Rows of every batch to make.
        steps: Numbers of the batches.
        workers: Processes that make batches; 0 makes each batch in this process when it is needed.
    """
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
    """Returns the workers of a rank: one per four cores that it has, at most four."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores_of_rank = len(os.sched_getaffinity(0)) // ranks_here
    return min(_MOST_WORKERS_BY_DEFAULT, cores_of_rank // _CORES_FOR_A_WORKER)


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
