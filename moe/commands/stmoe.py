"""The console command `stmoe`: each verb is the `main` of a module, imported when the verb is given.

    stmoe pretrain --config st_moe_tiny_pretrain --corpus corpus --tokenizer tokenizer --out run
    stmoe generate --model run/model "Replace the <extra_id_0> of this sentence."

On several devices torchrun starts it: `torchrun --nproc-per-node 4 -m stmoe pretrain ...`.
"""

import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, NamedTuple

from moe.cli import AGAIN, RESUME
from moe.errors import ConfigError, did_you_mean

_WIDTH = 11  # of the names, in --help


class Verb(NamedTuple):
    """A verb of a command.

    Attributes:
        module: Module in moe.commands whose `main` it runs.
        summary: Line of --help that says what it does.
        trains: Whether it is a training run, which can be resumed and counts its seconds.
    """

    module: str
    summary: str
    trains: bool = False


VERBS = {
    "corpus": Verb("build_corpus", "build a corpus from your text, or from installed packages"),
    "tokenizer": Verb("train_tokenizer", "train a SentencePiece vocabulary on a corpus"),
    "recipes": Verb("recipes", "list the recipes that --config knows by name"),
    "plan": Verb("plan", "compute the needs of a run on a mesh, without any device"),
    "pretrain": Verb("pretrain", "pre-train a model by span corruption", trains=True),
    "finetune": Verb("finetune", "fine-tune a model on pairs of texts", trains=True),
    "goodput": Verb("goodput", "show how the seconds of a run were spent"),
    "generate": Verb("generate", "answer texts with a model"),
    "inspect": Verb("inspect_router", "see, replay and edit what the routers of a model do"),
    "convert": Verb("convert", "convert a checkpoint of T5, Switch, T5X or ours"),
}


def main(
    argv: list[str],
    *,
    read_tasks: Callable[..., Any] | None = None,
    process_start: float | None = None,
) -> None:
    """Runs the verb that the arguments begin with.

    Args:
        argv: The verb and its options.
        read_tasks: Reads the tasks of the repository; None if there are none.
        process_start: When this process started, in seconds since 1970, if it serves only this
            command.

    Raises:
        ConfigError: When there is no such verb.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return
    if argv[0] == "--version":
        print(f"stmoe {version('stmoe')}")
        return

    run_verb = verb_main("stmoe", argv[0], VERBS)
    arguments: list[Any] = [argv[1:]]
    if read_tasks is not None:
        arguments.append(read_tasks)
    if VERBS[argv[0]].trains:
        run_verb(*arguments, process_start=process_start)
    else:
        run_verb(*arguments)


def advice_after_interrupt(argv: list[str]) -> str:
    """Returns how to continue after Ctrl-C or a full disk."""
    is_run = bool(argv) and argv[0] in VERBS and VERBS[argv[0]].trains
    return RESUME if is_run else AGAIN


def _help() -> str:
    lines = ["usage: stmoe VERB [OPTION ...]", "", *verb_lines(VERBS)]
    lines += ["", "stmoe VERB --help explains the options of a verb; stmoe --version prints ours."]
    return "\n".join(lines)


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
