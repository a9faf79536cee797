"""python -m eval: evaluates sequence-to-sequence checkpoints.

    python -m eval list
    python -m eval run --model DIR --tasks NAME[,NAME]
    python -m eval compare A B
    python -m eval harness TASK[,TASK] --model DIR

Each command is a file of eval/commands. Under torchrun, e.g. `torchrun --standalone
--nproc-per-node 4 -m eval run ... --ep 2`, ranks share the work.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import argparse
import sys

from eval.commands import compare, harness, run, tasks
from eval.commands.command import Command
from moe.cli import Parser, run_main

COMMANDS: dict[str, Command] = {"list": tasks, "run": run, "compare": compare, "harness": harness}


def main(argv: list[str]) -> None:
    """Runs a command."""
    parser = Parser(
        prog="python -m eval", description="Evaluates sequence-to-sequence checkpoints."
    )
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS.values():
        command.add_parser(subparsers)

    arguments = parser.parse_args(argv, argparse.Namespace(argv=argv))
    COMMANDS[arguments.command].run(arguments)


def advice_after_interrupt(argv: list[str]) -> str:
    """Returns how to resume a command after Ctrl-C or a full disk."""
    if argv[:1] == ["run"]:
        return "The same command goes on: answers that it wrote are kept."
    return "Run the same command again: it begins anew."


if __name__ == "__main__":
    run_main(main, interrupted=advice_after_interrupt(sys.argv[1:]))
