"""From a command line and YAML files to a recipe; every mistake is one ConfigError that names the
key.
"""

import argparse
import dataclasses
import itertools
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import yaml
from jsonargparse import ArgumentParser

from moe.checks import check, check_flag, shown
from moe.distributed.launch import DEFAULT_TIMEOUT
from moe.errors import ConfigError, MoEError, did_you_mean
from moe.models.configuration import STMoEConfig
from moe.parsing import read_yaml
from moe.sparse.router_options import router_options_by_name
from moe.training.recipe import Recipe

R = TypeVar("R", bound=Recipe)

_LONGEST_INTEGER = 1000  # bits
_LONGEST_VALUE = 80  # characters
_LONGEST_TEXT = 400
_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    dict: "a mapping",
    type(None): "null",
}


class Setting(NamedTuple):
    """One key of a recipe: its dotted name, type, default (`argparse.SUPPRESS` for none) and
    explanation.
    """

    name: str
    type: Any
    default: Any
    help: str


class RecipeCommand(Generic[R]):
    """A command whose arguments are a recipe and a few of its own.

    `--config FILE` may be given several times, later files and later arguments win;
    `--print_config` shows the result and ends.

    Example:
        command = RecipeCommand(PretrainRecipe, "Pre-trains a model.")
        command.add_argument("--out", type=str, required=True, help="folder of the run")
        recipe, arguments = command.parse(argv)
    """

    def __init__(self, kind: type[R], description: str) -> None:
        self.kind = kind
        self._settings = {setting.name: setting for setting in recipe_settings(kind)}
        self._mappings = {
            name for name, setting in self._settings.items() if _is_mapping(setting.type)
        }
        self._own_arguments: dict[str, dict[str, Any]] = {}
        options = {
            f"{name}.{option}" for name in self._mappings for option in router_options_by_name()
        }
        self._suggested = options | self._settings.keys()
        self._parser = ArgumentParser(description=description, exit_on_error=False)
        self._parser.add_argument(
            "--config", action="config", help="YAML file with settings; later ones win"
        )
        for setting in self._settings.values():
            self._parser.add_argument(
                f"--{setting.name}", type=setting.type, default=setting.default, help=setting.help
            )

    def add_argument(self, name: str, **options: Any) -> None:
        """Adds an argument that is no setting of the recipe, as `argparse` has it."""
        self._own_arguments[name.removeprefix("--")] = options
        self._parser.add_argument(name, **options)

    def add_timeout(self) -> None:
        """Adds `--timeout`, for `timeout`."""
        explanation = f"seconds that ranks wait for others ({DEFAULT_TIMEOUT:g})"
        self.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT, help=explanation)

    def timeout(self, argv: list[str]) -> float:
        """Returns the seconds that ranks wait for each other, for `launch`, before they have met.

        Of arguments that are wrong the default: `parse` says among the ranks, and once, what is
        wrong with them.
        """
        try:
            return self.parse(argv)[1].timeout
        except MoEError:
            return DEFAULT_TIMEOUT

    def parse(self, argv: list[str]) -> tuple[R, argparse.Namespace]:
        """Returns the recipe and the command's own arguments.

        Raises:
            ConfigError: When a key is unknown, a value has the wrong type or is impossible, or a
                file is unreadable.
        """
        self._refuse_unknown_options(argv)
        for file in _config_files(argv):
            self._check_file(Path(file))
        _refuse_long_numbers(argv)
        _refuse_empty_paths(
            argv, {name for name, own in self._own_arguments.items() if own.get("type") is Path}
        )

        try:
            parsed = self._parser.parse_args(argv)
        except argparse.ArgumentError as error:
            raise ConfigError(self._in_our_words(error)) from error
        self._refuse_nulls(parsed)

        values = parsed.as_dict()
        own = {name: values[name] for name in self._own_arguments}
        return build_recipe(self.kind, values), argparse.Namespace(**own)

    def _refuse_unknown_options(self, argv: list[str]) -> None:
        """Raises a ConfigError for the first `--name` that the command does not have."""
        known = (
            self._settings.keys() | self._own_arguments.keys() | {"config", "print_config", "help"}
        )
        for argument in argv:
            name = argument.removeprefix("--").split("=")[0]
            if (
                argument.startswith("--")
                and name not in known
                and name.rpartition(".")[0] not in self._mappings
            ):
                closest = did_you_mean(name, known | self._suggested)
                raise ConfigError(
                    f"There is no option --{name}.{closest} --help lists all of them."
                )

    def _refuse_nulls(self, parsed: Any) -> None:
        """Raises a ConfigError for the first setting that is null and may not be; jsonargparse lets
        all be null.
        """
        for setting in self._settings.values():
            nullable = type(None) in typing.get_args(setting.type)
            if setting.name in parsed and parsed[setting.name] is None and not nullable:
                kind = getattr(setting.type, "__name__", setting.type)
                raise ConfigError(
                    f"{setting.name} is null; expected {kind}. Give a value, or leave the key out."
                )

    def _check_file(self, file: Path) -> None:
        """Raises a ConfigError for the first key of a YAML file that is no setting, or whose value
        cannot be one.
        """
        if file.is_fifo():
            raise ConfigError(
                f"{file} is a pipe, which can be read only once. Save the settings in a file."
            )

        sections = {name.partition(".")[0] + "." for name in self._settings if "." in name}
        known = self._settings.keys() | self._own_arguments.keys() | sections
        for key, value in _leaves(read_yaml(file), self._mappings):
            if key not in known:
                raise ConfigError(
                    f"{file}: there is no setting {shown(key)} in a {self.kind.__name__}."
                    f"{did_you_mean(key, self._suggested)} Remove it or correct its name."
                )
            if isinstance(value, int) and value.bit_length() > _LONGEST_INTEGER:
                raise ConfigError(
                    f"{file}: {key} is {shown(value)}; expected a number of at most 300 digits."
                )
            if key in self._own_arguments:
                _check_own(f"{file}: {key}", value, self._own_arguments[key])

    def _in_our_words(self, error: argparse.ArgumentError) -> str:
        """Returns jsonargparse's message about a value of the wrong type: the setting, the value,
        what is expected.
        """
        text = " ".join(str(error).split())
        key = re.search(r'[Pp]arser key "([^"]+)"', text)
        value = re.search(r"(?:Got|Given) value: (.*)$", text)
        if key is None or value is None or key[1] not in self._settings:
            return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
        given = value[1] if len(value[1]) <= _LONGEST_VALUE else f"{value[1][:_LONGEST_VALUE]}..."
        return f"{key[1]} is {given}; expected {_in_words(self._settings[key[1]].type)}."


def typed_settings(argv: list[str]) -> set[str]:
    """Returns the names of the settings that a command line gives itself, beside those of its
    files.
    """
    return {
        argument.removeprefix("--").split("=")[0] for argument in argv if argument.startswith("--")
    }


def recipe_settings(kind: type[Recipe]) -> Iterator[Setting]:
    """Yields every key that a recipe of this kind has, with the types and words of its dataclasses."""
    explain_config = _attribute_help(STMoEConfig)
    config_types = {item.name: item.type for item in dataclasses.fields(STMoEConfig)}
    for item in dataclasses.fields(kind):
        default = _default(item)
        if item.name == "model":
            for name in sorted(kind.model_fields, key=list(config_types).index):
                value = kind.model_defaults.get(name, argparse.SUPPRESS)
                yield Setting(f"model.{name}", config_types[name], value, explain_config[name])
        elif dataclasses.is_dataclass(default):
            part: Any = type(default)
            types, explain = typing.get_type_hints(part), _attribute_help(part)
            for sub in dataclasses.fields(part):
                value = getattr(default, sub.name)
                yield Setting(f"{item.name}.{sub.name}", types[sub.name], value, explain[sub.name])
        else:
            explain = _attribute_help(kind) | _attribute_help(Recipe)
            yield Setting(
                item.name, typing.get_type_hints(kind)[item.name], default, explain[item.name]
            )


def build_recipe(kind: type[R], values: dict[str, Any]) -> R:
    """Returns the recipe of nested plain values, e.g. those that `dataclasses.asdict` gave; other
    keys are ignored.
    """
    arguments = {}
    for item in dataclasses.fields(kind):
        if item.name in values:
            default, value = _default(item), values[item.name]
            arguments[item.name] = (
                type(default)(**value) if dataclasses.is_dataclass(default) else value
            )
    return kind(**arguments)


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Writes every setting of a recipe as YAML that `--config` reads."""
    path.write_text(yaml.safe_dump(dataclasses.asdict(recipe), sort_keys=False), encoding="utf-8")


def _default(item: dataclasses.Field[Any]) -> Any:
    """Returns the default of a dataclass field."""
    factory = item.default_factory
    return item.default if factory is dataclasses.MISSING else factory()


def _attribute_help(cls: type) -> dict[str, str]:
    """Returns the explanation of each attribute that the docstring of a class lists under
    `Attributes:`.
    """
    section = (cls.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, flags=re.MULTILINE)
    explanations = {name: " ".join(text.split()) for name, text in entries}
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    return {item.name: explanations.get(item.name, "") for item in fields}


def _config_files(argv: list[str]) -> list[str]:
    """Returns the files that the arguments name with --config."""
    following = [value for option, value in itertools.pairwise(argv) if option == "--config"]
    return following + [
        argument.partition("=")[2] for argument in argv if argument.startswith("--config=")
    ]


def _is_mapping(kind: Any) -> bool:
    """Returns whether a setting of this type holds names and values of its own, or may."""
    return any(typing.get_origin(part) is dict for part in (kind, *typing.get_args(kind)))


def _leaves(
    mapping: dict[str, Any], leaves: set[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of the leaves of nested mappings, e.g. `optim.lr`; `optim.` for
    an empty one.

    Args:
        mapping: Read from YAML.
        leaves: Names whose value is a mapping itself.
        prefix: Of the names in `mapping`.
    """
    if prefix and not mapping:
        yield prefix, None
    for key, value in mapping.items():
        if isinstance(value, dict) and f"{prefix}{key}" not in leaves:
            yield from _leaves(value, leaves, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_own(name: str, value: object, options: dict[str, Any]) -> None:
    """Raises a ConfigError when a value in a file is not of the kind that the command's own
    argument has.
    """
    if options.get("action") == "store_true":
        check_flag(name, value)
    elif options.get("required"):
        check(
            value is not None,
            name,
            value,
            "a value; leave the key out to give it on the command line",
        )
    if options.get("nargs") == "+" and value is not None:
        check(isinstance(value, list), name, value, "a list, e.g. [0, 1]")
    if options.get("type") is Path and value is not None:
        path = isinstance(value, str) and value.strip() and "\0" not in value
        check(bool(path), name, value, "a path")


def _refuse_long_numbers(argv: list[str]) -> None:
    """Raises a ConfigError for a number that no setting can have and that Python takes ages to
    read.
    """
    for before, argument in itertools.pairwise(["", *argv]):
        name, _, value = argument.rpartition("=")
        if re.fullmatch(r"[+-]?[\d_]{300,}|0x[0-9a-fA-F_]{250,}", value):
            raise ConfigError(
                f"{name or before} is {shown(value)}; expected a number of at most 300 digits."
            )


def _refuse_empty_paths(argv: list[str], names: set[str]) -> None:
    """Raises a ConfigError for the first of these options that is given an empty text: as a path,
    the folder here.
    """
    for before, argument in itertools.pairwise(["", *argv]):
        option, separator, value = (
            argument.partition("=") if argument.startswith("--") else (before, "=", argument)
        )
        if option.removeprefix("--") in names and separator and not value.strip():
            raise ConfigError(
                f"{option} is empty; expected a path. Give one, or leave the option out."
            )


def _in_words(kind: Any) -> str:
    """Returns what a setting of this type is."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_in_words(part) for part in parts)
    if origin is list:
        return f"a list, each {_in_words(parts[0])}"
    return _WORDS.get(origin or kind, getattr(kind, "__name__", str(kind)))
