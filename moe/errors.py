"""The error family of the library."""

import difflib
from collections.abc import Iterable


class MoEError(Exception):
    """Any error that this library raises on purpose.

    Its text names the problem, the value, the expectation, and the fix.
    """

    exit_code = 2
    """Exit code of a command that ends with this error."""


class ConfigError(MoEError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class DataError(MoEError, ValueError):
    """A corpus, data file or batch cannot be used as it is."""


class CheckpointError(MoEError, RuntimeError):
    """A checkpoint is missing, incomplete, or belongs to another model, recipe or corpus."""


class NonFiniteError(DataError):
    """Numbers that a model computes with are NaN or infinite."""


class DivergenceError(CheckpointError):
    """Training has diverged: loss, gradient or the router's logits are not finite.

    A command ends with exit code 3, so that a program that starts many runs can tell.
    """

    exit_code = 3


class Interrupted(KeyboardInterrupt):
    """A signal has ended the work cleanly, and results are kept.

    Args:
        text: Message on what was kept, and where.
        signal_number: The signal; the exit code of a command is 128 plus this number.
    """

    def __init__(self, text: str, signal_number: int) -> None:
        super().__init__(text)
        self.exit_code = 128 + signal_number


class DistributedError(MoEError, RuntimeError):
    """Ranks do not find each other, or one is lost later."""


def is_panic(error: BaseException) -> bool:
    """Returns whether a library written in Rust panicked, e.g. `tokenizers`.

    Its `PanicException` is not an `Exception`, and no module exports it.
    """
    return type(error).__name__ == "PanicException"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `" Did you mean 'x'?"` for the closest known name, or "" when none is close.

    It never suggests private names or `name` itself.
    """
    others = [other for other in known if not other.startswith("_") and other != name]
    matches = difflib.get_close_matches(str(name)[:80], others, n=1, cutoff=0.5)
    return f" Did you mean {matches[0]!r}?" if matches else ""
