"""Collectives: sums over ranks, and steps that all ranks take or none. With one rank they change nothing."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from moe.errors import MoEError

T = TypeVar("T")


def gather_or_raise(function: Callable[[], T], group: ProcessGroup | None = None) -> list[T]:
    """Calls a function on every rank and returns what it returned on each, in order; small things
    that pickle.

    No rank goes on before all have called it. Where it failed its error is raised as it is, and
    elsewhere a copy of the first rank's error that failed.

    Args:
        function: What this rank does; it may differ from rank to rank, but must not wait for other
            ranks itself where it can fail.
        group: Ranks that take part; None for all.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [function()]
    own: Exception | None = None
    answer: T | None = None
    try:
        answer = function()
    except Exception as error:
        own = error
    answers = cast(list[tuple[T, Exception | None]], [None] * dist.get_world_size(group))
    dist.all_gather_object(answers, (answer, own and _picklable(own)), group=group)
    if own is not None:
        raise own
    for _, error in answers:
        if error is not None:
            raise error
    return [answer for answer, _ in answers]


def _picklable(error: Exception) -> Exception:
    """Returns an error that other ranks can raise: our own and the disk's as they are, others by
    their text.
    """
    return (
        error
        if isinstance(error, MoEError | OSError)
        else RuntimeError(f"{type(error).__name__}: {error}")
    )


def is_rank_zero() -> bool:
    """Returns whether this process speaks for all: the first rank, or the only process."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def broadcast_from_rank_zero(make: Callable[[], T]) -> T:
    """Returns on every rank what `make` returns on the first, and raises everywhere what it raises
    there.

    Args:
        make: Runs on the first of all ranks only; its result must be something that pickle takes.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return make()
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = make()
        except Exception as error:
            answer[1] = error
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def sum_over_ranks(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Returns the sum of <any>[...] over the ranks of a group, the same on each; carries no
    gradient.

    Args:
        x: This rank's part; left as it is.
        group: Ranks that take part; None for all.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return x
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def sum_each_over_ranks(
    values: Sequence[Tensor], group: ProcessGroup | None = None
) -> list[Tensor]:
    """Returns the sum of each <any>[...] over the ranks of a group; all of one dtype travel in one
    exchange.

    Args:
        values: This rank's parts; left as they are.
        group: Ranks that take part; None for all.
    """
    dtypes = dict.fromkeys(value.dtype for value in values)
    flat = {
        dtype: torch.cat([value.flatten() for value in values if value.dtype == dtype])
        for dtype in dtypes
    }
    sums = {dtype: sum_over_ranks(numbers, group) for dtype, numbers in flat.items()}
    parts = {
        dtype: iter(numbers.split([value.numel() for value in values if value.dtype == dtype]))
        for dtype, numbers in sums.items()
    }
    return [next(parts[value.dtype]).view_as(value) for value in values]


def copy_to_tp_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Returns <float>[...] as it is; its gradient is the sum over the ranks that work on shards of
    what follows.

    Source:
        Megatron-LM (arXiv:1909.08053) §3, the operator f. `reduce_from_tp_region` is its g.
    """
    return x if group is None else _CopyToTpRegion.apply(x, group)


def reduce_from_tp_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Returns the sum of <float>[...] over the ranks, each of which gives its shard's part; see
    `copy_to_tp_region`.
    """
    return x if group is None else _ReduceFromTpRegion.apply(x, group)


class _CopyToTpRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        with record_function("moe.tp.backward"):
            return sum_over_ranks(grad_outputs[0].contiguous(), ctx.group), None


class _ReduceFromTpRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        with record_function("moe.tp.forward"):
            return sum_over_ranks(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None
