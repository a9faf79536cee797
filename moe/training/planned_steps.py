"""Planned steps: which step comes next, and which rows of its batch this rank computes.

On one mesh, steps are consecutive and the rows stay the same. Replica groups that may be lost
meet before each step: the remaining groups share the rows, a lost step is repeated, and a healed
group continues where the others are.
"""

import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import torch

from moe.checkpoint.run_state import RunState
from moe.checkpoint.train_state import live_state, load_live_state
from moe.data.batches_ahead import batches_ahead
from moe.data.pipeline import BatchSource
from moe.distributed.collectives import is_rank_zero
from moe.distributed.mesh import MeshConfig
from moe.distributed.replica_groups import LostStepError, ReplicaGroups
from moe.training.build import BuiltModel
from moe.training.heldout_loss import to_device
from moe.training.step import Share


class PlannedStep(NamedTuple):
    """The next step to take.

    Attributes:
        step: Its number, from 0.
        shares: This rank's shares of the batch.
        data_wait: Seconds spent waiting for them.
    """

    step: int
    shares: Sequence[Share]
    data_wait: float


class ShareSource(NamedTuple):
    """Makes the batches of a rank.

    Attributes:
        source: Makes the batches of the whole run.
        config: Mesh of the whole run.
        workers: Processes that make batches ahead; see `batches_ahead`.
        device: The model's.
    """

    source: BatchSource
    config: MeshConfig
    workers: int
    device: torch.device

    def plan(self, data_ranks: Sequence[int], steps: range) -> Generator[PlannedStep, None, None]:
        """Yields each step with the rows of these data ranks."""
        rows_per_rank = self.source.batch_size // self.config.num_data_ranks
        with ExitStack() as stack:
            batches: list[Iterator[Any]] = []
            for data_rank in data_ranks:
                first = data_rank * rows_per_rank
                rows = slice(first, first + rows_per_rank)
                of_rank = batches_ahead(self.source, rows, steps, workers=self.workers)
                batches.append(stack.enter_context(closing(of_rank)))

            for step in steps:
                started = time.perf_counter()
                shares: list[Share] = []
                for data_rank, coming in zip(data_ranks, batches, strict=True):
                    shares.append(Share(data_rank, to_device(next(coming), self.device)))
                yield PlannedStep(step, shares, time.perf_counter() - started)


class LiveState(NamedTuple):
    """The state that replica groups send each other.

    Attributes:
        built: The model.
        optimizer: Optimizer of its parameters.
        settings: Settings that all groups must share.
        check: Raises when another group's settings differ.
    """

    built: BuiltModel
    optimizer: torch.optim.Optimizer
    settings: RunState
    check: Callable[[RunState], None]

    def save(self) -> dict[str, Any]:
        """Returns the current state."""
        model, layouts, _ = self.built
        settings = self.settings._asdict()
        return {"settings": settings, "tensors": live_state(model, self.optimizer, layouts)}

    def load(self, state: dict[str, Any]) -> None:
        """Takes over the state of another group."""
        self.check(RunState(**state["settings"]))
        model, layouts, _ = self.built
        load_live_state(state["tensors"], model, self.optimizer, layouts)


def live_steps(
    replicas: ReplicaGroups, source: ShareSource, state: LiveState, steps: range
) -> Generator[PlannedStep, None, None]:
    """Yields the steps of a replica group until all groups have taken the last one.

    A step that raised a LostStepError is yielded again, perhaps with other rows.

    Args:
        replicas: The groups.
        source: Makes batches.
        state: State that a group that has fallen behind takes over.
        steps: Remaining steps of this group.
    """
    mesh = state.built.mesh
    with ExitStack() as stack:
        stack.enter_context(replicas.joined(steps.start, state.save, state.load))
        batches = _RestartableBatches(source, steps.stop)
        stack.callback(batches.close)
        num_live = replicas.num_groups
        next_step = steps.start
        while True:
            state.optimizer.zero_grad(set_to_none=True)
            try:
                live = replicas.begin_step()
                if live.step > next_step:
                    _report(
                        f"Healed: took over the state of another group after step {live.step:,}."
                    )
                if live.num_live != num_live:
                    _report(
                        f"From step {live.step + 1:,} on {live.num_live} of {replicas.num_groups} replica groups take "
                        "part."
                    )
                num_live = live.num_live
                next_step = live.step + 1
                if live.step >= steps.stop:
                    # No group leaves while another still needs the last state.
                    replicas.sum_each([torch.ones(())])
                    return
            except LostStepError:
                continue

            # Data ranks of a group are neighbours, as on a mesh of all groups.
            ranks_of_group = source.config.launched.num_data_ranks
            data_rank = mesh.data_rank if mesh else 0
            numbers: list[int] = []
            for share in replicas.shares(live):
                numbers.append(share * ranks_of_group + data_rank)
            yield batches.at(live.step, numbers)


def _report(change: str) -> None:
    """Prints a change of the groups below the progress bar, once for all ranks."""
    if is_rank_zero():
        print(f"\n{change}", file=sys.stderr, flush=True)  # noqa: T201


class _RestartableBatches:
    """Batches made ahead of consecutive steps, restarted when the next step or the rows change.

    Args:
        source: Makes batches.
        last_step: Steps in the whole run.
    """

    def __init__(self, source: ShareSource, last_step: int) -> None:
        self._source = source
        self._last_step = last_step
        self._steps: Generator[PlannedStep, None, None] | None = None
        self._data_ranks: Sequence[int] = ()
        self._current: PlannedStep | None = None

    def at(self, step: int, data_ranks: Sequence[int]) -> PlannedStep:
        """Returns a step with the rows of these data ranks."""
        has_same_rows = data_ranks == self._data_ranks
        if has_same_rows and self._current is not None and self._current.step == step:
            return self._current

        # After a change, prefetched batches are discarded.
        follows = self._current is not None and self._current.step + 1 == step
        if self._steps is None or not (has_same_rows and follows):
            self.close()
            self._steps = self._source.plan(data_ranks, range(step, self._last_step))
            self._data_ranks = data_ranks
        self._current = next(self._steps)
        return self._current

    def close(self) -> None:
        """Ends the processes that make batches."""
        if self._steps is not None:
            self._steps.close()
