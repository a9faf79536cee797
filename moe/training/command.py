"""Reads a recipe from a command line and recipe files.

Every mistake is one ConfigError that names the setting, and the file that contains it.
"""

import argparse
import dataclasses
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import yaml
from jsonargparse import ArgumentParser

from moe.checks import check, check_flag, describe_type, shown
from moe.distributed.launch import DEFAULT_TIMEOUT, World, launch
from moe.errors import ConfigError, MoEError, did_you_mean
from moe.files import write_text
from moe.models.configuration import STMoEConfig
from moe.parsing import reading
from moe.sparse.config import SparseConfig
from moe.sparse.router_options import ROUTERS, option_names
from moe.training.command_help import Setting, short_help
from moe.training.optim_recipe import optim_options
from moe.training.recipe import Recipe
from moe.training.recipe_files import (
    EXTENDS,
    RecipeFile,
    find_recipe,
    merged_text,
    read_recipe_files,
)

R = TypeVar("R", bound=Recipe)

_USAGE = "%(prog)s [--config RECIPE] [--OPTION VALUE ...]"

_STEPS = "training.steps"
_COOLDOWN = "optim.cooldown_steps"

_LONGEST_VALUE = 80  # characters
_LONGEST_TEXT = 400


class _Arguments(NamedTuple):
    """A command line whose recipe files have been read.

    Attributes:
        argv: The arguments, each file replaced by its settings with those of its parents.
        sources: File of each setting by dotted name, unless a later argument overrides it.
        values: Text of each setting, from a file or an argument.
    """

    argv: list[str]
    sources: dict[str, Path]
    values: dict[str, str]


class RecipeCommand(Generic[R]):
    """A command whose arguments are the settings of a recipe and a few additional ones.

    `--config FILE` (or the name of one of our recipes) may be given several times, and later files win.
    Other arguments override files, whether they come before or after.
    `--print_config` prints the result, including inherited settings (`extends:`), and exits.
    `--help` explains the options people use, `--help-all` all.

    Example:
        command = RecipeCommand(PretrainRecipe, "Pre-trains a model.", prog="stmoe pretrain")
        command.add_argument("--out", type=str, required=True, help="folder of the run")
        recipe, arguments = command.parse(argv)
    """

    def __init__(self, kind: type[R], description: str, *, prog: str | None = None) -> None:
        self.kind = kind
        self._settings = {setting.name: setting for setting in recipe_settings(kind)}
        self._mappings = {name for name, item in self._settings.items() if _is_mapping(item.type)}
        self._command_arguments: dict[str, dict[str, Any]] = {}

        # Suggestions for misspelt names: settings, and options of routers and optimizers.
        self._suggestions = set(self._settings)
        for name in self._mappings:
            routers = [ROUTERS.get(router) for router in ROUTERS.names()]
            of_routers = [option for router in routers for option in option_names(router)]
            for option in optim_options(name) or of_routers:
                self._suggestions.add(f"{name}.{option}")

        self._parser = ArgumentParser(
            prog=prog, usage=_USAGE, description=description, exit_on_error=False
        )
        self._parser.add_argument(
            "--config",
            action="config",
            help="YAML file with settings, or name of a recipe; later ones win",
        )
        for setting in self._settings.values():
            self._parser.add_argument(
                f"--{setting.name}", type=setting.type, default=setting.default, help=setting.help
            )

    def add_argument(self, name: str, **options: Any) -> None:
        """Adds an argument that is not a setting of the recipe, as in `argparse`."""
        self._command_arguments[name.removeprefix("--")] = options
        self._parser.add_argument(name, **options)

    def add_timeout(self) -> None:
        """Adds `--timeout`, for `launch`."""
        self.add_argument(
            "--timeout",
            type=float,
            default=DEFAULT_TIMEOUT,
            help=f"seconds that ranks wait for others ({DEFAULT_TIMEOUT:g})",
        )

    @contextmanager
    def launch(
        self, argv: list[str], check_arguments: Callable[[list[str]], None] | None = None
    ) -> Iterator[tuple[World, R, argparse.Namespace]]:
        """Parses the arguments and joins the ranks, which wait for each other for `--timeout`.

        Args:
            argv: The command line, without the program.
            check_arguments: Raises a ConfigError for arguments that are not worth parsing.

        Yields:
            The world, the recipe and the command's own arguments.

        Raises:
            ConfigError: As `parse` does, on one of the ranks.
        """
        try:
            if check_arguments is not None:
                check_arguments(argv)
            recipe, arguments = self.parse(argv)
        except MoEError:
            # All ranks fail alike; inside the world, only one of them prints the message.
            with launch():
                raise
        with launch(arguments.timeout) as world:
            yield world, recipe, arguments

    def parse(self, argv: list[str]) -> tuple[R, argparse.Namespace]:
        """Returns the recipe and the command's own arguments.

        `--help` and `--help-all` are answered here, and end the process.

        Raises:
            ConfigError: When a key is unknown, a value has the wrong type or is impossible, or a
                file is unreadable.
        """
        if "--help" in argv or "-h" in argv:
            print(self._short_help())  # noqa: T201  the answer to --help
            sys.exit(0)
        if "--help-all" in argv:
            # jsonargparse removes a space with a backspace, which files and escapes would show.
            print(self._parser.format_help().replace(" \b", ""))  # noqa: T201  likewise
            sys.exit(0)

        # Check names before values, so that a misspelt setting is reported by its name.
        self._refuse_unknown_options(argv)
        arguments = self._read_files(argv)

        # An empty path would mean the current folder.
        for name, options in self._command_arguments.items():
            if options.get("type") is Path and not arguments.values.get(name, "x").strip():
                raise ConfigError(
                    f"--{name} is empty; expected a path. Give one, or leave the option out."
                )

        advice = "--help-all explains all settings."
        with reading("The command line", advice=advice, error=ConfigError):
            try:
                parsed = self._parser.parse_args(arguments.argv)
            except argparse.ArgumentError as error:
                text = self._describe_wrong_type(str(error), arguments.values)
                raise ConfigError(_name_source(text, arguments.sources)) from error

        try:
            self._refuse_nulls(parsed)
            values = parsed.as_dict()
            recipe = build_recipe(self.kind, values)
        except ConfigError as error:
            raise ConfigError(_name_source(str(error), arguments.sources)) from error

        own_arguments = argparse.Namespace()
        for name in self._command_arguments:
            setattr(own_arguments, name, values[name])
        return recipe, own_arguments

    def _short_help(self) -> str:
        parser = self._parser
        return short_help(
            parser.prog, parser.description or "", self._settings, self._command_arguments
        )

    def _refuse_unknown_options(self, argv: list[str]) -> None:
        """Raises a ConfigError for the first `--name` that the command does not have."""
        known = {
            "config",
            "print_config",
            "help",
            "help-all",
            *self._settings,
            *self._command_arguments,
        }
        for argument in argv:
            name = argument.removeprefix("--").split("=")[0]
            is_option = argument.startswith("--")
            # Keys of a mapping, such as a router's options, are checked where they are used.
            in_mapping = name.rpartition(".")[0] in self._mappings
            if is_option and name not in known and not in_mapping:
                closest = did_you_mean(name, known | self._suggestions)
                raise ConfigError(
                    f"There is no option --{name}.{closest} --help-all lists all of them."
                )

    def _read_files(self, argv: list[str]) -> _Arguments:
        """Reads and checks the recipe files that the arguments name, and their parents.

        Raises:
            ConfigError: When a file cannot be read, or one of its keys is not a setting.
        """
        arguments = _Arguments([], {}, {})
        steps_of_cooldown = ""
        previous = ""
        for argument in _files_first(argv):
            option, separator, value = argument.partition("=")
            if previous == "--config" or (option == "--config" and separator):
                path = find_recipe(argument if previous == "--config" else value)
                files = read_recipe_files(path)

                # If several files give a setting, the last child wins.
                for file in reversed(files):
                    settings = self._check_file(file)
                    for name, setting in settings.items():
                        arguments.sources[name] = file.path
                        arguments.values[name] = str(setting)
                    if _COOLDOWN in settings:
                        steps_of_cooldown = arguments.values.get(_STEPS, "")

                # jsonargparse accepts the text of a file instead of its path.
                if previous == "--config":
                    arguments.argv.pop()
                arguments.argv.append(f"--config={merged_text(files)}")
                previous = ""
                continue

            # A typed setting overrides that of a file.
            if option.startswith("--"):
                typed = option.removeprefix("--")
                arguments.values[typed] = value
                for name in list(arguments.sources):
                    if typed == name or typed.startswith(f"{name}."):
                        del arguments.sources[name]
            elif previous.startswith("--"):
                arguments.values[previous.removeprefix("--")] = argument
            arguments.argv.append(argument)
            previous = argument
        arguments.argv.extend(_scaled_cooldown(arguments, steps_of_cooldown))
        return arguments

    def _check_file(self, file: RecipeFile) -> dict[str, Any]:
        """Returns the settings of a file by their dotted names.

        Raises:
            ConfigError: For the first unknown key or invalid value.
        """
        # An empty section changes nothing and is allowed.
        known = {*self._settings, *self._command_arguments}
        for name in self._settings:
            section, dot, _ = name.partition(".")
            if dot:
                known.add(section + dot)

        settings = {}
        for key, value in _leaves(file.settings, self._mappings):
            if key not in known:
                raise ConfigError(
                    f"{file.path}: there is no setting {shown(key)} in a {self.kind.__name__}."
                    f"{did_you_mean(key, self._suggestions | {EXTENDS})} Remove it or correct its name."
                )
            if key in self._command_arguments:
                _check_argument(f"{file.path}: {key}", value, self._command_arguments[key])
            settings[key] = value
        return settings

    def _refuse_nulls(self, parsed: Any) -> None:
        """Raises a ConfigError for the first setting that is null and may not be.

        jsonargparse allows null for all settings.
        """
        for setting in self._settings.values():
            is_nullable = type(None) in typing.get_args(setting.type)
            if setting.name in parsed and parsed[setting.name] is None and not is_nullable:
                kind = getattr(setting.type, "__name__", setting.type)
                raise ConfigError(
                    f"{setting.name} is null; expected {kind}. Give a value, or leave the key out."
                )

    def _describe_wrong_type(self, text: str, values: dict[str, str]) -> str:
        """Returns the message for a value of a wrong type: the setting, the value, the expected type.

        Args:
            text: jsonargparse's message, of several lines, which names the setting in quotes.
            values: Text of each setting.
        """
        for name, value in values.items():
            if f'"{name}"' in text and name in self._settings:
                expected = describe_type(self._settings[name].type, none="null")
                return f"{name} is {_shorten(value, _LONGEST_VALUE)}; expected {expected}."

        missing = text.partition("arguments are required: ")[2]
        if missing:
            options = ", ".join(f"--{name}" for name in missing.split(", "))
            return f"{options} must be given. --help explains them."

        # Of a value that YAML cannot read, only a part is shown.
        for name, value in values.items():
            if text.strip("'") in value:
                return f"{name} is {_shorten(value, _LONGEST_VALUE)}, which cannot be read."
        return _shorten(" ".join(text.split()), _LONGEST_TEXT)


# ---------------------------------------------------------------------------
# Recipes and their settings


def typed_settings(argv: list[str]) -> set[str]:
    """Returns the names of the settings given on the command line, not in files."""
    names = set()
    for argument in argv:
        if argument.startswith("--"):
            names.add(argument.removeprefix("--").split("=")[0])
    return names


def recipe_settings(kind: type[Recipe]) -> Iterator[Setting]:
    """Yields every key of a recipe of this kind, with type and help text from its dataclasses."""
    types_of_kind = typing.get_type_hints(kind)
    help_of_kind = _attribute_help(kind) | _attribute_help(Recipe)
    for item in dataclasses.fields(kind):
        default = _default(item)
        if item.name == "model":
            yield from _model_settings(kind)
        elif dataclasses.is_dataclass(default):
            yield from _section_settings(item.name, default)
        else:
            yield Setting(item.name, types_of_kind[item.name], default, help_of_kind[item.name])


def _model_settings(kind: type[Recipe]) -> Iterator[Setting]:
    """Yields the settings of the model, in the order of STMoEConfig."""
    help_texts = _attribute_help(STMoEConfig)
    # STMoEConfig leaves the explanation of a sparse layer's fields to SparseConfig.
    for name, text in _attribute_help(SparseConfig).items():
        if name in help_texts and (not help_texts[name] or "`SparseConfig`" in help_texts[name]):
            help_texts[name] = text
    for item in dataclasses.fields(STMoEConfig):
        if item.name in kind.model_fields:
            default = kind.model_defaults.get(item.name, argparse.SUPPRESS)
            yield Setting(f"model.{item.name}", item.type, default, help_texts[item.name])


def _section_settings(name: str, section: Any) -> Iterator[Setting]:
    """Yields the settings of a section, which is a dataclass."""
    field_types = typing.get_type_hints(type(section))
    help_texts = _attribute_help(type(section))
    for item in dataclasses.fields(section):
        default = getattr(section, item.name)
        yield Setting(f"{name}.{item.name}", field_types[item.name], default, help_texts[item.name])


def _files_first(argv: Sequence[str]) -> list[str]:
    """Returns the arguments with `--config` and its values before all others."""
    files: list[str] = []
    others: list[str] = []
    previous = ""
    for argument in argv:
        is_file = "--config" in (previous, argument.partition("=")[0])
        (files if is_file else others).append(argument)
        previous = argument
    return files + others


def _scaled_cooldown(arguments: _Arguments, steps_of_cooldown: str) -> list[str]:
    """Returns the option that keeps the cooldown of a recipe in proportion to the steps of the run.

    With `cooldown_steps: 400` of `steps: 800`, `--training.steps 150` has a cooldown of 75 steps. A
    cooldown on the command line is kept as it is.

    Args:
        arguments: The command line, whose files have been read.
        steps_of_cooldown: Steps of the run for which a file has set the cooldown; "" for none.
    """
    cooldown = arguments.values.get(_COOLDOWN, "")
    steps = arguments.values.get(_STEPS, "")
    is_from_file = _COOLDOWN in arguments.sources
    are_counts = all(
        re.fullmatch("[1-9][0-9]{0,7}", n) for n in (cooldown, steps, steps_of_cooldown)
    )
    if not (is_from_file and are_counts) or steps == steps_of_cooldown:
        return []
    return [f"--{_COOLDOWN}={int(cooldown) * int(steps) // int(steps_of_cooldown)}"]


def build_recipe(kind: type[R], values: dict[str, Any]) -> R:
    """Returns the recipe of nested plain values, as from `dataclasses.asdict`; ignores other keys."""
    arguments = {}
    for item in dataclasses.fields(kind):
        if item.name not in values:
            continue
        # A section is a nested dataclass.
        default = _default(item)
        value = values[item.name]
        if dataclasses.is_dataclass(default):
            value = type(default)(**value)
        arguments[item.name] = value
    return kind(**arguments)


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Writes every setting of a recipe as YAML that `--config` reads."""
    write_text(path, yaml.safe_dump(dataclasses.asdict(recipe), sort_keys=False))


def _default(item: dataclasses.Field[Any]) -> Any:
    factory = item.default_factory
    return item.default if factory is dataclasses.MISSING else factory()


def _attribute_help(cls: Any) -> dict[str, str]:
    """Returns the text of each field of a dataclass, from `Attributes:` in its docstring."""
    # The section ends at an empty line; continuation lines are indented further.
    section = (cls.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    help_texts = {item.name: "" for item in dataclasses.fields(cls)}
    for name, text in re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, flags=re.MULTILINE):
        if name in help_texts:
            help_texts[name] = " ".join(text.split())
    return help_texts


# ---------------------------------------------------------------------------
# Checks and messages


def _is_mapping(kind: Any) -> bool:
    return any(typing.get_origin(part) is dict for part in (kind, *typing.get_args(kind)))


def _leaves(
    mapping: dict[str, Any], leaves: set[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yields dotted name and value of each leaf, e.g. `optim.lr`; `optim.` for an empty mapping.

    Args:
        mapping: Settings of a file.
        leaves: Names of settings whose value is a mapping.
        prefix: Put before every name in `mapping`.
    """
    if prefix and not mapping:
        yield prefix, None
    for key, value in mapping.items():
        if isinstance(value, dict) and f"{prefix}{key}" not in leaves:
            yield from _leaves(value, leaves, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_argument(name: str, value: object, options: dict[str, Any]) -> None:
    """Raises a ConfigError when a file gives one of the command's own arguments a wrong value.

    Args:
        name: Name of the argument in messages.
        value: Value in the file.
        options: Options of the argument, as in `argparse`.
    """
    # A flag is true or false, and a required argument is not null.
    if options.get("action") == "store_true":
        check_flag(name, value)
    elif options.get("required"):
        check(
            value is not None,
            name,
            value,
            "a value; leave the key out to give it on the command line",
        )

    # Lists and paths.
    values = [value]
    if options.get("nargs") == "+" and value is not None:
        example = "[0, 1]" if options.get("type") is int else "[first, second]"
        check(isinstance(value, list) and bool(value), name, value, f"a list, e.g. {example}")
        values = list(value) if isinstance(value, list) else []
    if options.get("type") is Path and value is not None:
        for path in values:
            check(isinstance(path, str) and bool(path.strip()), name, path, "a path")


def _name_source(text: str, sources: dict[str, Path]) -> str:
    """If a message starts with a setting's name, prefixes it with the file that contains the setting."""
    name = text.partition(" ")[0]
    return f"{sources[name]}: {text}" if name in sources else text


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
