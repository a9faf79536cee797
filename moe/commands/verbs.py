"""Commands with verbs: each verb is a `main` in a module of its own, imported when it is given."""

import importlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from moe.cli import AGAIN
from moe.errors import ConfigError, did_you_mean

_WIDTH = 11  # of the names, in --help


class Verb(NamedTuple):
    """A verb of a command.

    Attributes:
        module: Module in moe.commands whose `main` it runs.
        summary: What it does, for --help.
        interrupted: How the user goes on after Ctrl-C.
    """

    module: str
    summary: str
    interrupted: str = AGAIN


def verb_main(command: str, name: str, verbs: Mapping[str, Verb]) -> Callable[..., None]:
    """Returns what a verb of a command runs.

    Raises:
        ConfigError: When there is no such verb.
    """
    if name not in verbs:
        raise ConfigError(
            f"There is no verb {name!r}.{did_you_mean(name, verbs)} {command} --help lists all of them."
        )
    return importlib.import_module(f"moe.commands.{verbs[name].module}").main


def verb_lines(verbs: Mapping[str, Verb]) -> list[str]:
    """Returns a line of --help for each verb."""
    return [f"  {name:<{_WIDTH}}{verb.summary}" for name, verb in verbs.items()]
