"""A context that one rank holds for all: a lock on a folder, or a folder that appears when whole."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

from moe.distributed.collectives import broadcast_from_rank_zero

T = TypeVar("T")


@contextmanager
def enter_on_rank_zero(make: Callable[[], AbstractContextManager[T]]) -> Iterator[T]:
    """Enters a context manager on rank zero; every rank gets its value and raises its errors.

    Every rank must call it. When the block ends well, no rank goes on before rank zero has left
    the context.

    Args:
        make: Makes the context manager; runs on rank zero only. What it yields must be something
            that pickle takes.
    """
    with ExitStack() as stack:
        value = broadcast_from_rank_zero(lambda: stack.enter_context(make()))
        yield value
        broadcast_from_rank_zero(stack.close)
