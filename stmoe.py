"""The start of every command, before torch is imported; and the console command `stmoe` itself.

Importing torch takes seconds, in which Ctrl-C must be answered; and the threads of OpenMP read the
environment once, when torch loads them. A command therefore imports this file first, which stands
beside the package: `import moe` needs torch.
"""

import os
import signal
import sys
from types import FrameType

_INTERRUPTED = b"\nInterrupted while starting. Nothing was written. Run the same command again.\n"

WAIT_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""Any of them says how long a thread spins while it waits: whoever sets one knows better."""


def start_command() -> None:
    """Answers Ctrl-C until `moe.cli.run_main` takes over, and shares cores with other processes."""
    _answer_interrupts()
    _share_cores()


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
    """Lets threads sleep while they wait for each other, and says so once.

    By default they spin. Where another process wants the core of one of them, the others burn
    theirs until it is back: a step of 0.4 seconds took 9 beside one busy process a core, and 1.4
    with threads that sleep.
    """
    # Too late when torch has its threads, and not ours to say when the user has said it.
    is_set = any(name in os.environ for name in WAIT_POLICIES)
    if is_set or "torch" in sys.modules:
        return

    os.environ["OMP_WAIT_POLICY"] = "passive"
    if os.environ.get("RANK", "0") == "0":
        print("Waiting threads sleep (OMP_WAIT_POLICY=passive; set it to choose).", file=sys.stderr)


def run() -> None:
    """Runs `stmoe` with the arguments of the process: the entry point of the wheel."""
    start_command()
    from moe.commands.stmoe import run as run_verb

    run_verb()


if __name__ == "__main__":
    run()
