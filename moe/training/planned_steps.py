"""Turns: which step comes next, and which rows of its batch this rank computes.

On one mesh every step follows the last and the rows stay the same. Where replica groups may be
lost, they meet before each step: who is left takes the rows, a step that was lost comes again, and
a group that was healed goes on where the others are.
"""

import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import torch

from moe.checkpoint.live_state import live_state, load_live_state
from moe.checkpoint.run_state import RunState
from moe.data.batches_ahead import batches_ahead
from moe.data.pipeline import BatchSource
from moe.distributed.collectives import is_rank_zero
from moe.distributed.mesh import MeshConfig
from moe.distributed.replica_groups import LiveGroups, LostStepError, ReplicaGroups
from moe.training.build import BuiltModel
from moe.training.heldout_loss import to_device
from moe.training.step import Share


class Turn(NamedTuple):
    """A step that is to be taken.

    Attributes:
        step: Its number, from 0.
        shares: Parts of its batch that are this rank's.
        data_wait: Seconds for which it waited for them.
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
    workers: int | None
    device: torch.device

    def turns(self, data_ranks: Sequence[int], steps: range) -> Generator[Turn, None, None]:
        """Yields the turn of each step with the rows of these data ranks."""
        rows_per_rank = self.source.batch_size // self.config.num_data_ranks
        with ExitStack() as stack:
            batches: list[Iterator[Any]] = []
            for data_rank in data_ranks:
                first = data_rank * rows_per_rank
                rows = slice(first, first + rows_per_rank)
                made = batches_ahead(self.source, rows, steps, workers=self.workers)
                batches.append(stack.enter_context(closing(made)))

            for step in steps:
                started = time.perf_counter()
                shares: list[Share] = []
                for data_rank, coming in zip(data_ranks, batches, strict=True):
                    shares.append(Share(data_rank, to_device(next(coming), self.device)))
                yield Turn(step, shares, time.perf_counter() - started)


class LiveState(NamedTuple):
    """The state that replica groups give each other.

    Attributes:
        built: The model.
        optimizer: Optimizer of its parameters.
        settings: What groups must have in common.
        check: Raises unless the settings of another group are these.
    """

    built: BuiltModel
    optimizer: torch.optim.Optimizer
    settings: RunState
    check: Callable[[RunState], None]

    def save(self) -> dict[str, Any]:
        """Returns the state as it is now."""
        model, layouts, _ = self.built
        settings = self.settings._asdict()
        return {"settings": settings, "tensors": live_state(model, self.optimizer, layouts)}

    def load(self, state: dict[str, Any]) -> None:
        """Takes the state of another group over."""
        self.check(RunState(**state["settings"]))
        model, layouts, _ = self.built
        load_live_state(state["tensors"], model, self.optimizer, layouts)


def live_turns(
    replicas: ReplicaGroups, source: ShareSource, state: LiveState, steps: range
) -> Generator[Turn, None, None]:
    """Yields the turns of a replica group until all groups have taken the last step.

    A turn whose step raised a LostStepError comes again, perhaps with other rows.

    Args:
        replicas: The groups.
        source: Makes batches.
        state: What a group that is behind takes over.
        steps: Steps that this group has before it.
    """
    mesh = state.built.mesh
    with ExitStack() as stack:
        stack.enter_context(replicas.joined(steps.start, state.save, state.load))
        turns = _Restartable(source, steps.stop)
        stack.callback(turns.close)
        changes = _Changes(replicas.num_groups, steps.start)
        while True:
            state.optimizer.zero_grad(set_to_none=True)
            try:
                live = replicas.begin_step()
                changes.tell(live)
                if live.step >= steps.stop:
                    # Nobody leaves while another still needs the last state.
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
            yield turns.turn(live.step, numbers)


class _Changes:
    """Says on rank zero, once, who is there and where this group goes on.

    Args:
        num_groups: Groups that there should be.
        step: Step that this group begins with.
    """

    def __init__(self, num_groups: int, step: int) -> None:
        self._num_groups = num_groups
        self._num_live = num_groups
        self._step = step

    def tell(self, live: LiveGroups) -> None:
        """Tells what has changed since the last step."""
        if live.step > self._step:
            self._print(f"Healed: has the state of another group after step {live.step:,}.")
        if live.num_live != self._num_live:
            there = f"{live.num_live} of {self._num_groups} replica groups take part"
            self._print(f"From step {live.step + 1:,} on {there}.")
        self._num_live = live.num_live
        self._step = live.step + 1

    def _print(self, text: str) -> None:
        if is_rank_zero():
            print(f"\n{text}", file=sys.stderr, flush=True)  # noqa: T201  on the progress bar


class _Restartable:
    """Batches ahead of steps that follow each other, made anew when step or rows are others.

    Args:
        source: Makes batches.
        last_step: Steps in the whole run.
    """

    def __init__(self, source: ShareSource, last_step: int) -> None:
        self._source = source
        self._last_step = last_step
        self._turns: Generator[Turn, None, None] | None = None
        self._data_ranks: Sequence[int] = ()
        self._turn: Turn | None = None

    def turn(self, step: int, data_ranks: Sequence[int]) -> Turn:
        """Returns the turn of a step with the rows of these data ranks."""
        has_same_rows = data_ranks == self._data_ranks
        if has_same_rows and self._turn is not None and self._turn.step == step:
            return self._turn

        # After a change nothing that was made ahead is of use.
        follows = self._turn is not None and self._turn.step + 1 == step
        if self._turns is None or not (has_same_rows and follows):
            self.close()
            self._turns = self._source.turns(data_ranks, range(step, self._last_step))
            self._data_ranks = data_ranks
        self._turn = next(self._turns)
        return self._turn

    def close(self) -> None:
        """Ends the processes that make batches."""
        if self._turns is not None:
            self._turns.close()
