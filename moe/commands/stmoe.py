"""The console command `stmoe`: a table of verbs, each of which is a `main` of its own.

    stmoe pretrain --config recipe.yaml --corpus corpus --tokenizer tokenizer --out run
    stmoe generate --model run/model "Replace the <extra_id_0> of this sentence."

The same functions run as `python -m scripts.VERB` in the repository.
"""

import sys
from importlib.metadata import version

from moe.cli import AGAIN, RESUME, run_main
from moe.commands.verbs import Verb, verb_lines, verb_main

VERBS = {
    "corpus": Verb("build_corpus", "build a corpus from your text, or from installed packages"),
    "tokenizer": Verb("train_tokenizer", "train a SentencePiece vocabulary on a corpus"),
    "plan": Verb("plan", "say what a run needs on a mesh, without any device"),
    "pretrain": Verb("pretrain", "pre-train a model by span corruption", RESUME),
    "finetune": Verb("finetune", "fine-tune a model on pairs of texts", RESUME),
    "goodput": Verb("goodput", "say what the seconds of a run went into"),
    "generate": Verb("generate", "answer texts with a model"),
    "inspect": Verb("inspect_router", "see, replay and edit what the routers of a model do"),
    "convert": Verb("convert", "convert a checkpoint of T5, Switch, T5X or ours"),
}


def main(argv: list[str]) -> None:
    """Runs the verb that the arguments begin with.

    Raises:
        ConfigError: When there is no such verb.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return
    if argv[0] == "--version":
        print(f"stmoe {version('stmoe')}")
        return
    verb_main("stmoe", argv[0], VERBS)(argv[1:])


def _help() -> str:
    lines = ["usage: stmoe VERB [OPTION ...]", "", *verb_lines(VERBS)]
    lines += ["", "stmoe VERB --help explains the options of a verb; stmoe --version prints ours."]
    return "\n".join(lines)


def run() -> None:
    """Runs `stmoe` with the arguments of the process: the entry point of the wheel."""
    verb = VERBS.get(sys.argv[1]) if len(sys.argv) > 1 else None
    run_main(main, interrupted=AGAIN if verb is None else verb.interrupted)
