"""What can go wrong, said once: the error family of the library and how a command ends on one."""

import difflib
import errno
import sys
from collections.abc import Callable, Iterable


class MoEError(Exception):
    """Any error that this library raises on purpose; its text says what, which value, what was expected, what to do."""


class ConfigError(MoEError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class DataError(MoEError, ValueError):
    """A corpus, data file or batch cannot be used as it is."""


class CheckpointError(MoEError, RuntimeError):
    """A checkpoint is missing, torn, or belongs to another model, recipe or corpus."""


class DistributedError(MoEError, RuntimeError):
    """Ranks do not find each other, or one is lost on the way."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `" Did you mean 'x'?"` for the closest known name, or an empty string when none is close.

    Neither a private name is suggested nor the one that was given.
    """
    others = [other for other in known if not other.startswith("_") and other != name]
    matches = difflib.get_close_matches(str(name), others, n=1, cutoff=0.5)
    return f" Did you mean {matches[0]!r}?" if matches else ""


_RESUME = "The same command with --resume goes on from the last checkpoint."


def run_main(main: Callable[[list[str]], None], *, interrupted: str = _RESUME) -> None:
    """Runs a command and turns its failure into one message and an exit code.

    A `MoEError` or an `OSError` (missing file, full disk) ends with exit code 2 and no traceback, Ctrl-C with 130.
    `--debug` anywhere on the command line shows the traceback instead.

    Args:
        main: The command; receives the arguments without the program name and without `--debug`.
        interrupted: How it goes on after Ctrl-C.
    """
    debug = "--debug" in sys.argv[1:]
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        main(arguments)
    except KeyboardInterrupt:
        print(f"\nInterrupted. {interrupted}", file=sys.stderr)
        sys.exit(130)
    except (MoEError, OSError) as error:
        if debug:
            raise
        print(f"error: {_message(error)}", file=sys.stderr)
        sys.exit(2)


def _message(error: Exception) -> str:
    """Returns the text of an error; a full disk says what to do."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = f" while writing {error.filename}" if error.filename else ""
        advice = "Free some space and run the same command again, a training with --resume; nothing earlier was lost."
        return f"the disk is full{place}. {advice}"
    return str(error)
