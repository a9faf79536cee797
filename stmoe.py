"""The start of every command, before torch is imported; and the console command `stmoe` itself.

Importing torch takes seconds, in which Ctrl-C must be answered; and OpenMP reads the environment
once, when torch loads it. Every command therefore imports this file first. It lies beside the
package because `import moe` needs torch.
"""

import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from types import FrameType

_INTERRUPTED = b"\nInterrupted while starting. Nothing was written. Run the same command again.\n"

WAIT_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""Variables that say how long a waiting thread spins; one that the user set is left alone."""

SPIN_COUNT = 10_000
"""Rounds that a waiting thread spins before it sleeps, half a millisecond; libgomp's default is 300,000."""

_TASK_READERS = {"corpus": "CORPUS_READERS", "finetune": "read_mixture", "inspect": "read_pairs"}
"""Names in `eval.task_readers` by which verbs read the tasks and texts of the repository."""


def start_command() -> None:
    """Answers Ctrl-C until `moe.cli.run_main` takes over, and shares cores with other processes."""
    # A starter that ignores Ctrl-C, as `nohup` does, is left alone.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_at_once)
    _share_cores()


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    """Ends the process with a message and code 130.

    Some imports swallow an exception or print its traceback, so none is raised.
    """
    os.write(2, _INTERRUPTED)
    os._exit(130)


def _share_cores() -> None:
    """Lets threads sleep when they wait for each other for long, and says so once.

    By default they spin for milliseconds. When another process takes the core of one of them, the
    others waste theirs until it is back: two small trainings of two threads each, on two cores,
    take 4.5 seconds a step, and 0.3 with this. Threads that sleep at once must be woken for every
    small product: one training alone then takes 0.176 seconds a step instead of 0.101, and 0.105
    with this.
    """
    # Once torch is loaded it is too late; what the user has set is kept.
    is_set = any(name in os.environ for name in WAIT_POLICIES)
    if is_set or "torch" in sys.modules:
        return

    os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    if os.environ.get("RANK", "0") == "0":
        text = f"Waiting threads soon sleep (GOMP_SPINCOUNT={SPIN_COUNT}; set it to choose)."
        print(text, file=sys.stderr)


def main(argv: list[str], *, process_start: float | None = None) -> None:
    """Runs a verb of `stmoe`, in the repository with the tasks of eval/.

    Args:
        argv: The verb and its options.
        process_start: When this process started, in seconds since 1970, if it exists for this
            command alone; a training run then counts its seconds from there.
    """
    from moe.commands import stmoe

    read_tasks = None
    repository = Path(__file__).resolve().parent
    if argv and argv[0] in _TASK_READERS and (repository / "eval/task_readers.py").is_file():
        # Console commands do not find modules in the repository by themselves.
        if str(repository) not in sys.path:
            sys.path.append(str(repository))
        read_tasks = getattr(import_module("eval.task_readers"), _TASK_READERS[argv[0]])
    stmoe.main(argv, read_tasks=read_tasks, process_start=process_start)


def run() -> None:
    """Runs `stmoe` with the arguments of the process: the entry point of the wheel."""
    process_start = time.time()
    start_command()
    from functools import partial

    from moe.cli import run_main
    from moe.commands.stmoe import advice_after_interrupt

    advice = advice_after_interrupt(sys.argv[1:])
    run_main(partial(main, process_start=process_start), interrupted=advice)


if __name__ == "__main__":
    run()
