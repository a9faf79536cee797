"""The start of every command, before torch is imported; and the console command `stmoe` itself.

Importing torch takes seconds, in which Ctrl-C must be answered; and the threads of OpenMP read the
environment once, when torch loads them. A command therefore imports this file first, which stands
beside the package: `import moe` needs torch.
"""

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

_INTERRUPTED = b"\nInterrupted while starting. Nothing was written. Run the same command again.\n"

WAIT_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""Any of them says how long a thread spins while it waits: whoever sets one knows better."""

_start_times: list[float] = []
"""When this process started, in seconds since 1970, until its run takes it; else empty."""

_last_calls: list[Callable[[], None]] = []
"""Functions that are called last as this process exits."""

SPIN_COUNT = 10_000
"""Rounds that a waiting thread spins before it sleeps, half a millisecond; libgomp's are 300,000."""


def start_command(*, one_run: bool = False) -> None:
    """Answers Ctrl-C until `moe.cli.run_main` takes over, and shares cores with other processes.

    Args:
        one_run: Whether the process exists for one training run, whose time then begins here.
    """
    if one_run:
        _start_times.append(time.time())
        atexit.register(_call_last)
    _answer_interrupts()
    _share_cores()


def take_start_time() -> float | None:
    """Returns when this process started if it exists for one run, to its first caller; else None."""
    return _start_times.pop() if _start_times else None


def call_last(function: Callable[[], None]) -> None:
    """Calls a function when a process for one run exits, after all other functions of `atexit`."""
    _last_calls.append(function)


def _call_last() -> None:
    for function in _last_calls:
        function()


def _answer_interrupts() -> None:
    """Makes Ctrl-C end the process with a message and code 130.

    An exception would not do: inside an import some code drops it or shows its traceback.
    """
    # A starter that ignores Ctrl-C, as `nohup` does, is left alone.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_at_once)


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    os.write(2, _INTERRUPTED)
    os._exit(130)


def _share_cores() -> None:
    """Lets threads sleep when they wait for each other for long, and says so once.

    By default they spin for milliseconds. Where another process wants the core of one of them, the
    others burn theirs until it is back: two small trainings of two threads each, on two cores, take
    4.5 seconds a step, and 0.3 with this. Threads that sleep at once would be woken for every small
    product: one training alone then takes 0.176 seconds a step instead of 0.101, and 0.105 with
    this.
    """
    # Too late when torch has its threads, and not ours to say when the user has said it.
    is_set = any(name in os.environ for name in WAIT_POLICIES)
    if is_set or "torch" in sys.modules:
        return

    os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    if os.environ.get("RANK", "0") == "0":
        text = f"Waiting threads soon sleep (GOMP_SPINCOUNT={SPIN_COUNT}; set it to choose)."
        print(text, file=sys.stderr)


def run() -> None:
    """Runs `stmoe` with the arguments of the process: the entry point of the wheel."""
    start_command(one_run=True)
    from moe.commands.stmoe import run as run_verb

    run_verb()


if __name__ == "__main__":
    run()
