"""Ctrl-C and SIGTERM during training: the run finishes its step, writes a checkpoint, and ends.

Schedulers send SIGTERM some time before they reclaim a machine. Ranks get the signal at different
times, or not at all, but must all end after the same step.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from moe.distributed.collectives import has_ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask a run to end."""

_MESSAGE = b"\nThe run ends after this step, with a checkpoint. A second signal ends it at once, without.\n"


@contextmanager
def stop_requests() -> Iterator[Callable[[], int | None]]:
    """Defers signals that request the end of the run, and yields a function that returns them.

    The function returns the number of a signal that any rank has received, else None. All ranks
    must call it after the same steps, and all get the same answer. A second signal ends the process
    at once; in a notebook or at a prompt, Ctrl-C raises a KeyboardInterrupt instead. Signals that
    were ignored before, as under `nohup`, stay ignored.
    """
    received: int | None = None

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal received
        if received is not None:
            _act_at_once(number)
        received = number

        # print() is not safe here: the signal may have come in the middle of another print().
        os.write(2, _MESSAGE)

    def received_by_any_rank() -> int | None:
        if not has_ranks():
            return received
        number = torch.tensor(received or 0)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)  # the largest if ranks have received several
        return int(number) or None

    with ExitStack() as handlers:
        # Only the main thread may handle signals.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    handlers.callback(signal.signal, number, signal.signal(number, receive))
        yield received_by_any_rank


def _act_at_once(number: int) -> None:
    """Ends the process like an unhandled signal."""
    is_interactive = hasattr(sys, "ps1")
    if number == signal.SIGINT and is_interactive:
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
