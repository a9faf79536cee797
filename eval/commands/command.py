"""The form of the commands of `python -m eval`, and the type of options that list names."""

import argparse
from typing import Protocol


class Subparsers(Protocol):
    """What `ArgumentParser.add_subparsers` returns."""

    def add_parser(
        self, name: str, *, help: str | None = ..., description: str | None = ...
    ) -> argparse.ArgumentParser:
        """Returns the parser of a new command."""
        ...


class Command(Protocol):
    """A module of this folder."""

    def add_parser(self, commands: Subparsers) -> None:
        """Adds the command and its options."""
        ...

    def run(self, arguments: argparse.Namespace) -> None:
        """Does what the options say; `arguments.argv` is the whole command line."""
        ...


def name_list(text: str) -> list[str]:
    """Returns the names in a text, separated by commas, each once; the type of such an option."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(
            f"is {text!r}, in which a name is empty; expected names separated by commas"
        )
    return list(dict.fromkeys(names))
