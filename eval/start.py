"""Ctrl-C while a command starts: importing torch takes seconds, in which no other code of ours
runs.

It stands here, on the lowest floor that loads without torch, which `import moe` needs.
"""

import os
import signal
from types import FrameType

_MESSAGE = b"\nInterrupted while starting. Nothing was written. Run the same command again.\n"


def answer_interrupts() -> None:
    """Makes Ctrl-C end the process with a word and code 130, until `run_main` takes over.

    An exception would not do: inside an import some code drops it or shows its traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends the process."""
    os.write(2, _MESSAGE)
    os._exit(130)
