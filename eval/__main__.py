"""python -m eval: evaluates sequence-to-sequence checkpoints.

    python -m eval list
    python -m eval run --model DIR --tasks NAME[,NAME]
    python -m eval compare A B

Each command is a file of eval/commands. Under torchrun, e.g. `torchrun --standalone
--nproc-per-node 4 -m eval run ... --ep 2`, ranks share the work.
"""

import argparse
import sys
from collections.abc import Mapping
from importlib import import_module

from stmoe import Verb, find_verb, start_command

VERBS: Mapping[str, Verb] = {
    "list": Verb("list the tasks", "tasks"),
    "run": Verb("evaluate models on tasks, or on your own pairs", "run"),
    "compare": Verb("compare two runs on the same examples", "compare"),
}


def main(argv: list[str]) -> None:
    """Runs a command."""
    verb, options = find_verb(argv, "python -m eval", VERBS)
    command = import_module(f"eval.commands.{verb.module}")
    command.run(command.build_parser().parse_args(options, argparse.Namespace(argv=argv)))


def advice_after_interrupt(argv: list[str]) -> str:
    """Returns how to resume a command after Ctrl-C or a full disk."""
    if argv[:1] == ["run"]:
        return "The same command continues: answers that it wrote are kept."
    return "Run the same command again: it begins anew."


def run() -> None:
    """Runs the command with the arguments of the process."""
    find_verb([word for word in sys.argv[1:] if word != "--debug"], "python -m eval", VERBS)

    # The imports of moe take seconds.
    start_command()
    from moe.cli import run_main

    run_main(main, interrupted=advice_after_interrupt(sys.argv[1:]))


if __name__ == "__main__":
    run()
