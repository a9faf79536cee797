"""The text of `--help` of a command with a recipe: its own options, and the settings people use.

`--help-all` lists all settings; command.py has both.
"""

import argparse
import shutil
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

_SECTIONS = {
    "training": "length, batches and reports",
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


def short_help(
    prog: str,
    description: str,
    settings: Mapping[str, Setting],
    arguments: Mapping[str, dict[str, Any]],
) -> str:
    """Returns the text of `--help`.

    Args:
        prog: The command, e.g. `stmoe pretrain`.
        description: What it does.
        settings: All settings of its recipe by name; `COMMON_SETTINGS` of them are shown.
        arguments: Its own arguments, as for `argparse`, by name.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [--config RECIPE] [--OPTION VALUE ...]",
        description=description,
        epilog="In parentheses: the value without a recipe. "
        f"{prog} --help-all explains all {len(settings) + len(arguments)} options.",
        formatter_class=_Formatter,
        add_help=False,
    )
    run = parser.add_argument_group("run")
    run.add_argument(
        "--config",
        metavar="RECIPE",
        help="name of a recipe (`stmoe recipes` lists them), or YAML file; later ones win",
    )
    for name, options in arguments.items():
        text = options["help"] + (" (required)" if options.get("required") else "")
        run.add_argument(f"--{name}", **{**options, "help": text})

    groups = {section: parser.add_argument_group(title) for section, title in _SECTIONS.items()}
    for name in COMMON_SETTINGS:
        # Without a default, as the architecture in fine-tuning, a setting is rarely given.
        setting = settings.get(name)
        if setting is not None and setting.default is not argparse.SUPPRESS:
            default = "null" if setting.default is None else setting.default
            text = f"{_first_clause(setting.help)} ({default})"
            group = groups.get(name.rpartition(".")[0], run)
            group.add_argument(f"--{name}", metavar=_metavar(setting.type), help=text)
    return parser.format_help().rstrip()


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
