"""Steps that all ranks take or none: a failure on one of them is raised on every one."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe.errors import MoEError

T = TypeVar("T")


def together(function: Callable[[], T], group: ProcessGroup | None = None) -> list[T]:
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
