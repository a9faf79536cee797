"""Reads a recipe from a command line and recipe files.

Every mistake is one ConfigError that names the setting, and the file that contains it.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from moe.checks import check, check_flag, shown
from moe.cli import Parser
from moe.distributed.launch import DEFAULT_TIMEOUT, World, launch
from moe.errors import ConfigError, MoEError, did_you_mean
from moe.files import write_text
from moe.parsing import parse_yaml, write_yaml
from moe.sparse.router_options import ROUTERS, option_names
from moe.training.command_help import help_text, recipe_settings
from moe.training.optim_recipe import optim_options
from moe.training.recipe import Recipe
from moe.training.recipe_files import EXTENDS, find_recipe, merge, read_recipe_files

R = TypeVar("R", bound=Recipe)

_STEPS = "training.steps"
_COOLDOWN = "optim.cooldown_steps"


class RecipeCommand(Generic[R]):
    """A command whose arguments are the settings of a recipe and a few additional ones.

    `--config FILE` (or the name of one of our recipes) may be given several times, and later files win.
    Other arguments override files, whether they come before or after. Their values are read as YAML.
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
        self._sections = {name.partition(".")[0] for name in self._settings if "." in name}
        self._parser = Parser(
            prog=prog, description=description, add_help=False, allow_abbrev=False
        )
        self._command_arguments: dict[str, dict[str, Any]] = {}

        # Suggestions for misspelt names: settings, and options of routers and optimizers.
        self._suggestions = {EXTENDS, *self._settings}
        of_routers = [
            option for name in ROUTERS.names() for option in option_names(ROUTERS.get(name))
        ]
        for name, setting in self._settings.items():
            if setting.is_mapping:
                options = optim_options(name) or of_routers
                self._suggestions |= {f"{name}.{option}" for option in options}

    def add_argument(self, name: str, **options: Any) -> None:
        """Adds an argument that is not a setting of the recipe, as in `argparse`."""
        self._command_arguments[name.removeprefix("--")] = options
        self._parser.add_argument(name, **options)

    def add_run_options(self) -> None:
        """Adds the options of every run; `--timeout` is for `launch`."""
        self.add_argument("--out", type=str, required=True, help="folder of the run")
        self.add_argument("--resume", action="store_true", help="resume from the newest checkpoint")
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

        `--help`, `--help-all` and `--print_config` are answered here, and end the process.

        Raises:
            ConfigError: When a key is unknown, a value has the wrong type or is impossible, or a
                file is unreadable.
        """
        if {"-h", "--help", "--help-all"} & {*argv}:
            is_long = "--help-all" in argv
            settings = list(self._settings.values())
            print(help_text(self._parser, settings, self._command_arguments, is_long=is_long))  # noqa: T201
            sys.exit(0)

        configs, typed, words = self._split(argv)
        values, sources = self._read_files(configs, typed)
        for name, value in typed.items():
            _set(values, name, value)

        own = {name: values.pop(name) for name in self._command_arguments if name in values}
        try:
            recipe = build_recipe(self.kind, values)
        except ConfigError as error:
            name = str(error).partition(" ")[0].rstrip(":")
            where = f"{sources[name]}: " if name in sources else ""
            raise ConfigError(f"{where}{error}") from error
        if "--print_config" in argv:
            print(write_yaml(dataclasses.asdict(recipe)), end="")  # noqa: T201  the answer to the option
            sys.exit(0)

        # Arguments in files come first, so that those of the command line override them.
        for name, value in reversed(own.items()):
            options = self._command_arguments[name]
            words = [*_words_of(name, value, options, sources[name]), *words]
        return recipe, self._parser.parse_args(words)

    def _split(self, argv: list[str]) -> tuple[list[str], dict[str, Any], list[str]]:
        """Returns the files of `--config`, the settings by dotted name, and all other words.

        Raises:
            ConfigError: When there is no such option, or the value of a setting is missing or not YAML.
        """
        configs: list[str] = []
        typed: dict[str, Any] = {}
        others: list[str] = []
        known = {"config", "print_config", *self._command_arguments, *self._suggestions}
        words = iter(argv)
        for word in words:
            name, equals, text = word.removeprefix("--").partition("=")
            setting = self._settings.get(self._setting_of(name))
            if not word.startswith("--") or name in self._command_arguments:
                others.append(word)
            elif name == "config" or setting is not None:
                text = text if equals else next(words, "")
                check(text.strip() != "", f"--{name}", text, "a value")
                if setting is None:
                    configs.append(text)
                    continue
                value = parse_yaml(text, where=f"--{name} {shown(text)}", advice="Quote it.")
                typed[name] = text if setting.is_text and value is not None else value
            elif name != "print_config":
                closest = did_you_mean(name, known)
                raise ConfigError(
                    f"There is no option --{name}.{closest} --help-all lists all of them."
                )
        return configs, typed, others

    def _setting_of(self, name: str) -> str:
        """Returns the setting that an option sets: itself, or the mapping of which it sets one key."""
        mapping = name.rpartition(".")[0]
        is_key = mapping in self._settings and self._settings[mapping].is_mapping
        return mapping if is_key else name

    def _read_files(
        self, configs: list[str], typed: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Path]]:
        """Returns the merged settings of recipe files and their parents, and the file of each setting.

        A cooldown keeps its share of the steps: with `cooldown_steps: 400` of `steps: 800`,
        `--training.steps 150` has a cooldown of 75 steps, unless it is on the command line too.

        Args:
            configs: Paths or names of the files; later ones win.
            typed: Settings of the command line, which have no file.

        Raises:
            ConfigError: When a file cannot be read, or one of its keys is not a setting.
        """
        values: dict[str, Any] = {}
        sources: dict[str, Path] = {}
        steps_of_cooldown = None
        for config in configs:
            for file, content in read_recipe_files(find_recipe(config)):
                settings = self._check_keys(file, content)
                values = merge(values, settings)
                sources |= dict.fromkeys(_names(settings, self._settings), file)
                if sources.get(_COOLDOWN) is file:
                    steps_of_cooldown = _value(values, _STEPS)
        for name in typed:
            sources.pop(self._setting_of(name), None)

        cooldown = _value(values, _COOLDOWN)
        steps = typed.get(_STEPS, _value(values, _STEPS))
        are_counts = all(type(count) is int for count in (cooldown, steps, steps_of_cooldown))
        if are_counts and steps_of_cooldown:
            values["optim"]["cooldown_steps"] = cooldown * steps // steps_of_cooldown
        return values, sources

    def _check_keys(self, file: Path, content: dict[str, Any]) -> dict[str, Any]:
        """Returns the settings of a file without empty sections, which change nothing.

        Raises:
            ConfigError: For the first unknown key.
        """
        settings = {
            key: value
            for key, value in content.items()
            if key not in self._sections or value not in (None, {})
        }
        for name in _names(settings, self._settings):
            if name not in self._settings and name not in self._command_arguments:
                raise ConfigError(
                    f"{file}: there is no setting {shown(name)} in a {self.kind.__name__}."
                    f"{did_you_mean(name, self._suggestions)} Remove it or correct its name."
                )
        return settings


# ---------------------------------------------------------------------------
# Recipes


def typed_settings(argv: list[str]) -> set[str]:
    """Returns the names of the settings given on the command line, not in files."""
    options = [word for word in argv if word.startswith("--")]
    return {option.removeprefix("--").partition("=")[0] for option in options}


def build_recipe(kind: type[R], values: Mapping[str, Any]) -> R:
    """Returns the recipe of nested plain values; a section keeps its defaults for what is not given."""
    arguments = dict(values)
    default = kind()
    for item in dataclasses.fields(kind):
        section = getattr(default, item.name)
        if item.name in values and dataclasses.is_dataclass(section):
            settings = values[item.name]
            check(isinstance(settings, dict), item.name, settings, "a mapping of settings")
            types = get_type_hints(type(section))
            for name, value in settings.items():
                if type(value) is int and float in (types[name], *get_args(types[name])):
                    settings[name] = float(value)  # 3 and 3.0 are one setting, with one fingerprint
            arguments[item.name] = dataclasses.replace(section, **settings)  # pyright: ignore[reportArgumentType]
    return kind(**arguments)


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Writes every setting of a recipe as YAML that `--config` reads."""
    write_text(path, write_yaml(dataclasses.asdict(recipe)))


# ---------------------------------------------------------------------------
# Nested settings


def _names(
    content: Mapping[str, Any], settings: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    """Yields the dotted name of each setting in a file, e.g. `optim.lr`."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and name not in settings:
            yield from _names(value, settings, f"{name}.")
        else:
            yield name


def _value(values: Mapping[str, Any], name: str) -> Any:
    section, _, key = name.partition(".")
    return values.get(section, {}).get(key)


def _set(values: dict[str, Any], name: str, value: Any) -> None:
    """Sets the value of a dotted name."""
    *sections, key = name.split(".")
    for section in sections:
        if not isinstance(values.get(section), dict):
            values[section] = {}
        values = values[section]
    values[key] = value


def _words_of(name: str, value: Any, options: Mapping[str, Any], file: Path) -> list[str]:
    """Returns an argument of the command in a recipe file as words of a command line.

    Raises:
        ConfigError: When a flag or a list is something else.
    """
    where = f"{file}: {name}"
    if options.get("action") == "store_true":
        check_flag(where, value)
        return [f"--{name}"] if value else []
    if value is None:
        return []
    if options.get("nargs") == "+":
        example = "[0, 1]" if options.get("type") is int else "[first, second]"
        check(isinstance(value, list) and bool(value), where, value, f"a list, e.g. {example}")
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]
