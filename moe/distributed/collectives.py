"""Collectives: sums over ranks, and steps that all ranks take together or not at all.

With one rank they have no effect.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from moe.errors import MoEError

T = TypeVar("T")


def gather_or_raise(function: Callable[[], T], group: ProcessGroup | None = None) -> list[T]:
    """Calls a function on every rank and returns all results, in the order of the ranks.

    It returns when all ranks have called it. A rank on which the function fails raises its own
    error; the others raise a copy of the error of the first rank that failed. Results are pickled:
    keep them small.

    Args:
        function: May differ from rank to rank, but if it can fail, it must not wait for other ranks.
        group: Ranks that take part; None for all.
    """
    if not has_ranks():
        return [function()]

    # Keep a failure until the others are informed.
    own_error: Exception | None = None
    try:
        outcome = (function(), None)
    except Exception as error:
        own_error = error
        outcome = (None, _picklable(error))

    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, outcome, group=group)

    # This rank's own error first: it has a traceback, and its class may not be picklable.
    if own_error is not None:
        raise own_error
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]


def _picklable(error: Exception) -> Exception:
    """Returns an error that other ranks can raise.

    Our own errors and those of the disk keep their class; other errors are sent as text only.
    """
    if isinstance(error, MoEError | OSError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def has_ranks() -> bool:
    """Returns whether a process group exists."""
    return dist.is_available() and dist.is_initialized()


def is_rank_zero() -> bool:
    """Returns whether this process speaks for all: the first rank, or the only process."""
    return not has_ranks() or dist.get_rank() == 0


def broadcast_from_rank_zero(function: Callable[[], T]) -> T:
    """Calls a function on rank 0 and returns its result on every rank; its error is raised on all.

    Args:
        function: Runs on rank 0 only; its result is pickled.
    """
    if not has_ranks():
        return function()

    # The other ranks wait in the broadcast below, even if rank 0 fails.
    outcome: list[Any] = [None, None]  # result and error
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error

    dist.broadcast_object_list(outcome, src=0)
    result, error = outcome
    if error is not None:
        raise error
    return result


@contextmanager
def enter_on_rank_zero(make: Callable[[], AbstractContextManager[T]]) -> Iterator[T]:
    """Enters a context on rank 0 for all ranks; its value and its errors reach every rank.

    An example is a lock on a folder, or a folder that appears when it is whole. Every rank must call
    it. When the block ends without an error, all ranks wait until rank 0 has left the context.

    Args:
        make: Makes the context manager; runs on rank 0 only. The yielded value is pickled.
    """
    with ExitStack() as stack:
        value = broadcast_from_rank_zero(lambda: stack.enter_context(make()))
        yield value

        # An error in the block skips this: the stack then leaves the context without the others.
        broadcast_from_rank_zero(stack.close)


def sum_over_ranks(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Returns the sum of <any>[...] over the ranks of a group, without gradient.

    Args:
        x: <any>[...] this rank's part; not changed.
        group: Ranks that take part; None for all.
    """
    if not has_ranks():
        return x
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def sum_each_over_ranks(
    values: Sequence[Tensor], group: ProcessGroup | None = None
) -> list[Tensor]:
    """Returns the sum of each tensor over the ranks of a group; one exchange for each dtype.

    Args:
        values: <any>[...] this rank's parts; not changed.
        group: Ranks that take part; None for all.
    """
    return sum_each(values, partial(sum_over_ranks, group=group))


def sum_each(values: Sequence[Tensor], sum_one: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Returns the sum of each tensor; `sum_one` is called once for each dtype.

    Args:
        values: <any>[...] this rank's parts; not changed.
        sum_one: Returns the sum of a flat tensor <any>[N] over ranks.
    """
    indices_by_dtype: dict[torch.dtype, list[int]] = {}
    for index, value in enumerate(values):
        indices_by_dtype.setdefault(value.dtype, []).append(index)

    sums = list(values)
    for indices in indices_by_dtype.values():
        # All gradients of a dtype are sent as one flat tensor.
        flat = torch.cat([values[index].flatten() for index in indices])
        flat_sum = sum_one(flat)

        # Each gets its piece of the sum back, in its own shape.
        start = 0
        for index in indices:
            end = start + values[index].numel()
            sums[index] = flat_sum[start:end].view_as(values[index])
            start = end
    return sums


def all_gather_flat(
    output: Tensor, x: Tensor, group: ProcessGroup | None, *, async_op: bool = False
) -> Any:
    """Gathers <any>[N] of every rank of a group into <any>[n * N]; returns torch's handle."""
    # Its name since torch 2.13, which warns of the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, x, group=group, async_op=async_op)


def copy_to_tp_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Returns <float>[...] unchanged; its gradient is summed over the tensor-parallel ranks.

    It precedes layers of which every rank computes a shard.

    Source:
        Megatron-LM (arXiv:1909.08053) §3, the operator f. `reduce_from_tp_region` is its g.
    """
    return x if group is None else _CopyToTpRegion.apply(x, group)


def reduce_from_tp_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Returns the sum of <float>[...] over the tensor-parallel ranks; its gradient is unchanged.

    It follows layers of which every rank computes a shard; see `copy_to_tp_region`.
    """
    return x if group is None else _ReduceFromTpRegion.apply(x, group)


class _CopyToTpRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        # Each rank has the gradient from its own shard of the layers.
        with record_function("moe.tp.backward"):
            return sum_over_ranks(grad_outputs[0].contiguous(), ctx.group), None


class _ReduceFromTpRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        # Each rank has the partial output from its own shard of the layers.
        with record_function("moe.tp.forward"):
            return sum_over_ranks(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None
