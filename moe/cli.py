"""Shared by all commands: option types that check their value, and the exit of a command."""

import argparse
import errno
import gc
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from moe.checks import check_integer, check_number
from moe.errors import ConfigError, MoEError, did_you_mean, is_panic
from moe.files import find_model

RESUME = "The same command with --resume continues from the last checkpoint."
CONTINUES = "The same command resumes from the last checkpoints."
_OUT_OF_MEMORY = (
    "There is not enough memory. Choose a smaller model, smaller batches, shorter sequences or more "
    "ranks; `stmoe plan` counts what a run needs."
)
AGAIN = "Nothing half-written is left. Run the same command again."

_SIZE = re.compile(
    r"[1-9][0-9]{0,14}|[0-9]{0,6}[1-9](\.[0-9]{1,3})?[KMGT]B|[1-9][0-9]{0,6}[KMGT]B", re.IGNORECASE
)
_MOST_CHARACTERS = 2_000  # of a message, whose value may be as long as the command line


class Parser(argparse.ArgumentParser):
    """An `argparse` parser whose errors are ConfigErrors of one line."""

    def error(self, message: str) -> NoReturn:
        """Raises argparse's message as a ConfigError."""
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown:
            options = re.findall(r"--[\w-]+", self.format_usage())
            closest = did_you_mean(unknown[1], options)
            raise ConfigError(
                f"There is no option {unknown[1]}.{closest} --help lists all of them."
            )

        # argparse prefixes "is VALUE; expected ...", the message of the types below, with the option.
        text = message.removeprefix("argument ").replace(": is ", " is ", 1)
        raise ConfigError(f"{text.rstrip('.')}. --help explains all options.")


def integer(
    *, least: int | None = None, most: int | None = None, reason: str = ""
) -> Callable[[str], int]:
    """Returns the `type` of an integer option; see `check_integer`."""

    def read(text: str) -> int:
        value = _parsed(int, text)
        _refuse(check_integer, value, least=least, most=most, reason=reason)
        return value

    return read


def real(
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Callable[[str], float]:
    """Returns the `type` of an option for a finite number; see `check_number`."""

    def read(text: str) -> float:
        value = _parsed(float, text)
        _refuse(check_number, value, least=least, above=above, most=most, below=below)
        return value

    return read


def path(text: str) -> Path:
    """Converts the text of an option to a path; the `type` of such an option."""
    return Path(word(text))


def model_path(text: str) -> Path:
    """Converts the text of an option to a model's folder; `names` comes with the library."""
    return find_model(path(text))


def model_name(text: str) -> str:
    """Converts the text of an option to a model's folder or hub name likewise."""
    return find_model(word(text))


def file_size(text: str) -> int | str:
    """Converts the text of an option to a size, e.g. `500MB`, or a number of bytes above 0."""
    if not _SIZE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a size above 0, e.g. 500MB or 5GB")
    return int(text) if text.isdecimal() else text


def word(text: str) -> str:
    """Returns the text of an option unless it is empty; the `type` of such an option."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty; give a value, or leave the option out")
    return text


def _parsed(kind: Callable[[str], Any], text: str) -> Any:
    """Returns the number in a text, or the text itself if it is not a number."""
    try:
        return kind(text)
    except ValueError:
        return text


def _refuse(check_value: Callable[..., None], value: object, **bounds: Any) -> None:
    """Raises argparse's own error for a value out of bounds; argparse adds the option."""
    try:
        check_value("", value, **bounds)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).strip()) from error


def run_main(main: Callable[[list[str]], None], *, interrupted: str = AGAIN) -> None:
    """Runs a command; turns a failure into one message and an exit code.

    | exit code | after |
    |---|---|
    | 1 | an unexpected exception |
    | 2 | a `MoEError`, an `OSError` (missing file, full disk), too little memory |
    | 3 | training that diverged |
    | 130, 143 | Ctrl-C; training that stopped cleanly after SIGTERM |
    | 141 | the reader of the output closed the pipe |

    `--debug` anywhere on the command line shows the traceback instead.

    Args:
        main: The command; receives the arguments without the program name and without `--debug`.
        interrupted: How to continue after Ctrl-C or a full disk, unless the exception has a note.
    """
    # What was imported stays: the collector need not go through it.
    gc.freeze()
    gc.enable()

    debug = "--debug" in sys.argv[1:]
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    # The C locale encodes few letters. The method is replaced, not the stream, to which handlers of
    # logs keep a reference.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            vars(stream).setdefault("write", partial(_write_escaped, stream.write))

    try:
        # Ctrl-C raises KeyboardInterrupt, unless it is ignored, as under `nohup`.
        if callable(signal.getsignal(signal.SIGINT)):
            signal.signal(signal.SIGINT, signal.default_int_handler)
        main(arguments)
        sys.stdout.flush()

    except KeyboardInterrupt as interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another one ends the process at once
        print(
            f"\n{str(interrupt) or 'Interrupted.'} {_advice(interrupt, interrupted)}",
            file=sys.stderr,
        )
        sys.exit(getattr(interrupt, "exit_code", 130))

    # The reader closed the pipe, as `head` does.
    except BrokenPipeError:
        _forget_output()
        sys.exit(141)

    except BaseException as error:
        if debug or not (isinstance(error, Exception) or is_panic(error)):
            raise
        try:
            sys.stdout.flush()
        except OSError:  # e.g. the disk is full
            _forget_output()
        print(f"error: {_message(error, _advice(error, interrupted))}", file=sys.stderr)
        is_expected = isinstance(error, MoEError | OSError) or _is_out_of_memory(error)
        sys.exit(getattr(error, "exit_code", 2) if is_expected else 1)


# Characters by which an answer or a name in downloaded data would control a terminal. Progress bars
# need the carriage return.
_CONTROL_CHARACTERS = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t\r"
}


def _write_escaped(write: Callable[[str], int], text: str) -> int:
    return write(text.translate(_CONTROL_CHARACTERS))


def _is_out_of_memory(error: BaseException) -> bool:
    class_names = [kind.__name__ for kind in type(error).__mro__]
    return (
        isinstance(error, MemoryError)
        or "OutOfMemoryError" in class_names
        or "can't allocate memory" in str(error)  # torch has no class for it on a CPU
    )


def _forget_output() -> None:
    # At exit Python would try to write the rest again, and print an error.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())


def _advice(error: BaseException, default: str) -> str:
    return " ".join(getattr(error, "__notes__", [default]))


def _message(error: BaseException, again: str) -> str:
    """Returns the message for an error."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        file = f" while writing {error.filename}" if error.filename else ""
        reason = "the disk is full"
        if error.errno == errno.EFBIG:
            reason = "a file reached the largest size allowed"
        return f"{reason}{file}. Free some space. {again}"

    if isinstance(error, MoEError | OSError):
        return _shortened(str(error) or type(error).__name__)
    if _is_out_of_memory(error):
        return f"{_OUT_OF_MEMORY} ({_first_line(error)})"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"unexpected {type(error).__name__} in {frame.filename}, line {frame.lineno}: "
        f"{_first_line(error)}. --debug shows the traceback."
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return _shortened(lines[0].rstrip("."), most=500) if lines else "no message"


def _shortened(text: str, most: int = _MOST_CHARACTERS) -> str:
    text = text.replace("\r", "\\r")
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"
