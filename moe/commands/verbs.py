"""Commands with verbs: each verb is a `main` in a module of its own, imported when it is given."""

import importlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from moe.errors import ConfigError, did_you_mean

_WIDTH = 11  # of the names, in --help


class Verb(NamedTuple):
    """A verb of a command.

    Attributes:
        module: Module in moe.commands whose `main` it runs.
        summary: Line of --help that says what it does.
        trains: Whether it is a training run, which resumes, and counts the seconds of its process.
    """

    module: str
    summary: str
    trains: bool = False


def verb_main(command: str, name: str, verbs: Mapping[str, Verb]) -> Callable[..., None]:
    """Returns the function that a verb of a command runs.

    Raises:
        ConfigError: When there is no such verb.
    """
    if name not in verbs:
        closest = did_you_mean(name, verbs)
        raise ConfigError(f"There is no verb {name!r}.{closest} {command} --help lists all verbs.")
    return importlib.import_module(f"moe.commands.{verbs[name].module}").main


def verb_lines(verbs: Mapping[str, Verb]) -> list[str]:
    """Returns a line of --help for each verb."""
    return [f"  {name:<{_WIDTH}}{verb.summary}" for name, verb in verbs.items()]
