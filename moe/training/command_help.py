"""The settings of a recipe with their explanations, and the text of `--help` of a command with a recipe.

`--help` shows the settings people use, `--help-all` all of them.
"""

import argparse
import dataclasses
import re
import shutil
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from moe.models.configuration import STMoEConfig
from moe.sparse.config import SparseConfig
from moe.training.recipe import Recipe

_SECTIONS = {
    "training": "length, batches and reports",
    "lora": "adapters, with --parameters lora",
    "optim": "learning rate",
    "data": "rows",
    "distillation": "student and teacher",
    "mixture": "tasks",
    "model": "model",
    "mesh": "mesh, under torchrun",
}

COMMON_SETTINGS = (
    "seed",
    "init",
    "parameters",
    "training.steps",
    "training.batch_size",
    "training.micro_batch_size",
    "training.precision",
    "training.evaluate_every",
    "training.checkpoint_every",
    "optim.lr",
    "optim.warmup_steps",
    "optim.cooldown_steps",
    "data.inputs_length",
    "data.targets_length",
    "distillation.init",
    "distillation.hard_weight",
    "distillation.soft_weight",
    "distillation.temperature",
    "mixture.train_examples",
    "mixture.dev_examples",
    "model.d_model",
    "model.num_layers",
    "model.num_experts",
    "model.num_sparse_encoder_layers",
    "model.num_sparse_decoder_layers",
    "mesh.ep",
    "mesh.dp_shard",
)
"""Settings in `--help`: those that the recipes and guides set most, about 20 with a command's own
options."""

_WIDEST = 100  # characters of a line
_NAME_WIDTH = 38


class Setting(NamedTuple):
    """One key of a recipe.

    Attributes:
        name: Dotted name, e.g. `optim.lr`.
        type: Type of its value.
        default: Default value; `argparse.SUPPRESS` for none.
        help: Its text in `--help`.
    """

    name: str
    type: Any
    default: Any
    help: str

    @property
    def is_mapping(self) -> bool:
        """Whether the value is a mapping, whose keys may be options of their own."""
        return any(typing.get_origin(part) is dict for part in self._parts())

    @property
    def is_text(self) -> bool:
        """Whether a value on the command line is a text, even if it looks like a number."""
        return str in self._parts() and not self.is_mapping

    def _parts(self) -> tuple[Any, ...]:
        is_union = typing.get_origin(self.type) in (types.UnionType, typing.Union)
        return typing.get_args(self.type) if is_union else (self.type,)


def recipe_settings(kind: type[Recipe]) -> Iterator[Setting]:
    """Yields every key of a recipe of this kind, with type and help text from its dataclasses."""
    recipe = kind()
    annotations = typing.get_type_hints(kind)
    help_of_kind = _attribute_help(kind) | _attribute_help(Recipe)
    for item in dataclasses.fields(kind):
        default = getattr(recipe, item.name)
        if item.name == "model":
            yield from _model_settings(kind)
        elif dataclasses.is_dataclass(default):
            types = typing.get_type_hints(type(default))
            for name, text in _attribute_help(type(default)).items():
                yield Setting(f"{item.name}.{name}", types[name], getattr(default, name), text)
        else:
            yield Setting(item.name, annotations[item.name], default, help_of_kind[item.name])


def _model_settings(kind: type[Recipe]) -> Iterator[Setting]:
    """Yields the fields of STMoEConfig that a recipe may set."""
    # STMoEConfig leaves the explanation of a sparse layer's fields to SparseConfig.
    help_of_layer = _attribute_help(SparseConfig)
    for name, text in _attribute_help(STMoEConfig).items():
        if name in kind.model_fields:
            default = kind.model_defaults.get(name, argparse.SUPPRESS)
            is_elsewhere = not text or "`SparseConfig`" in text
            text = help_of_layer.get(name, text) if is_elsewhere else text
            yield Setting(f"model.{name}", STMoEConfig.__annotations__[name], default, text)


def _attribute_help(cls: Any) -> dict[str, str]:
    """Returns the text of each field of a dataclass, from `Attributes:` in its docstring."""
    # The section ends at an empty line; continuation lines are indented further.
    section = (cls.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    help_texts = {item.name: "" for item in dataclasses.fields(cls)}
    for name, text in re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, flags=re.MULTILINE):
        if name in help_texts:
            help_texts[name] = " ".join(text.split())
    return help_texts


def help_text(
    parser: argparse.ArgumentParser,
    settings: Sequence[Setting],
    arguments: Mapping[str, dict[str, Any]],
    *,
    is_long: bool,
) -> str:
    """Returns the text of `--help`, or of `--help-all`.

    Args:
        parser: Names and describes the command.
        settings: All settings of its recipe.
        arguments: Its own arguments, as for `argparse`, by name.
        is_long: Whether to explain all settings, and not only `COMMON_SETTINGS`. The model's, which are
            explained by STMoEConfig, are then listed.
    """
    prog = parser.prog
    shown = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [--config RECIPE] [--OPTION VALUE ...]",
        description=parser.description,
        epilog="In parentheses: the value without a recipe."
        + ("" if is_long else f" {prog} --help-all explains all options."),
        formatter_class=_Formatter,
        add_help=False,
    )
    run = shown.add_argument_group("run")
    run.add_argument(
        "--config",
        metavar="RECIPE",
        help="name of a recipe (`stmoe recipes` lists them), or YAML file; later ones win",
    )
    run.add_argument("--print_config", action="store_true", help="print all settings, and exit")
    for name, options in arguments.items():
        text = options["help"] + (" (required)" if options.get("required") else "")
        run.add_argument(f"--{name}", **{**options, "help": text})

    groups = {section: shown.add_argument_group(title) for section, title in _SECTIONS.items()}
    of_model = [setting for setting in settings if setting.name.startswith("model.")]
    for setting in settings:
        # Without a default, as the architecture in fine-tuning, a setting is rarely given.
        is_common = setting.name in COMMON_SETTINGS and setting.default is not argparse.SUPPRESS
        if is_common or (is_long and setting not in of_model):
            default = "null" if setting.default is None else setting.default
            text = setting.help.replace("%", "%%") if is_long else _first_clause(setting.help)
            group = groups.get(setting.name.rpartition(".")[0], run)
            metavar = _metavar(setting.type)
            group.add_argument(f"--{setting.name}", metavar=metavar, help=f"{text} ({default})")
    if is_long:
        names = ", ".join(setting.name.removeprefix("model.") for setting in of_model)
        groups["model"].add_argument(
            "--model.FIELD", metavar="VALUE", help=f"Field of STMoEConfig: {names}"
        )
    return shown.format_help().rstrip()


class _Formatter(argparse.HelpFormatter):
    """One line for an option if its text fits next to its name."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size((_WIDEST, 0)).columns, _WIDEST)
        super().__init__(prog, max_help_position=_NAME_WIDTH, width=width)


def _first_clause(text: str) -> str:
    """Returns the first clause of the text of a setting, e.g. `Updates in the whole run`."""
    sentence = text.split(". ")[0].removesuffix(".")
    return sentence.split("; ")[0].replace("%", "%%")


def _metavar(kind: Any) -> str:
    """Returns the placeholder for a value of this type, e.g. `N` or `{float32,bfloat16}`."""
    parts = set(typing.get_args(kind)) - {type(None)} or {kind}
    if typing.get_origin(kind) is typing.Literal:
        return "{" + ",".join(map(str, typing.get_args(kind))) + "}"
    if float in parts:
        return "X"
    return "N" if int in parts else "TEXT"
