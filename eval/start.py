"""Ctrl-C while a command starts, before `moe.cli.run_main` can answer it.

Importing torch takes seconds. This file loads without torch, which `import moe` needs, so a command
imports it first; that is why it is not a part of moe.cli.
"""

import os
import signal
from types import FrameType

_MESSAGE = b"\nInterrupted while starting. Nothing was written. Run the same command again.\n"


def answer_interrupts() -> None:
    """Makes Ctrl-C end the process with a message and code 130, until `run_main` takes over.

    An exception would not do: inside an import some code drops it or shows its traceback.
    """
    # A starter that ignores Ctrl-C, as `nohup` does, is left alone.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_at_once)


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    os.write(2, _MESSAGE)
    os._exit(130)
