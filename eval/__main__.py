"""python -m eval run --model DIR --tasks NAME[,NAME]; python -m eval list.

Under torchrun, e.g. `torchrun --standalone --nproc-per-node 4 -m eval run ... --ep 2`, ranks share the work.
"""

import argparse
import shlex
from pathlib import Path

from transformers.utils import logging

from eval.harness import add_harness_command, run_harness
from eval.predict import MODES
from eval.run import evaluate
from eval.task import SPLITS, TASKS
from moe import ConfigError, launch, run_main


def main(argv: list[str]) -> None:
    """Runs a sub-command."""
    parser = argparse.ArgumentParser(prog="python -m eval", description="Evaluates sequence-to-sequence checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="lists the tasks")
    run = commands.add_parser("run", help="evaluates models on tasks")
    run.add_argument("--model", required=True, help="checkpoint folder, or NAME=FOLDER to name it in the report")
    run.add_argument("--also", action="append", default=[], help="a further NAME=FOLDER to stand beside it")
    run.add_argument("--tasks", required=True, help="names, separated by commas")
    run.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)} (default: all)")
    run.add_argument("--split", choices=SPLITS, default="test")
    run.add_argument("--limit", type=int, help="most examples of a task")
    run.add_argument("--out", type=Path, default=Path("runs/eval"), help="folder of the reports (default: runs/eval)")
    run.add_argument("--ep", type=int, default=1, help="ranks that the experts of a layer are spread over (default: 1)")
    run.add_argument("--tp", type=int, default=1, help="ranks that heads and d_ff are spread over (default: 1)")
    run.add_argument("--timeout", type=float, default=600.0, help="seconds that ranks wait for others (default: 600)")
    add_harness_command(commands)
    arguments = parser.parse_args(argv)
    if arguments.command == "list":
        for name in TASKS.names():
            print(f"{name}: {TASKS.get(name).description}")
        return

    if arguments.command == "harness":
        run_harness(arguments)
        return

    logging.disable_progress_bar()
    with launch(arguments.timeout) as world:
        starter = ["python"] if world.size == 1 else ["torchrun", "--nproc-per-node", str(world.size)]
        report = evaluate(
            parse_models([arguments.model, *arguments.also]),
            arguments.tasks.split(","),
            modes=arguments.modes.split(","),
            split=arguments.split,
            limit=arguments.limit,
            out=arguments.out,
            command=shlex.join([*starter, "-m", "eval", *argv]),
            world=world,
            ep=arguments.ep,
            tp=arguments.tp,
        )
    if report is None:  # rank 0 speaks
        return
    for task in report["tasks"]:
        for row in task["systems"]:
            interval = f"{100 * row['low']:.1f} to {100 * row['high']:.1f}"
            print(f"{task['task']}  {row['name']:<20} {row['mode']:<9} {100 * row['accuracy']:5.1f} %  ({interval})")
    print(f"The reports are {arguments.out / 'report.json'} and {arguments.out / 'report.md'}.")


def parse_models(values: list[str]) -> dict[str, Path]:
    """Returns folders by name of `FOLDER` or `NAME=FOLDER`; without a name it is called model.

    Raises:
        ConfigError: When two have one name.
    """
    models: dict[str, Path] = {}
    for value in values:
        name, separator, folder = value.partition("=")
        name, folder = (name, folder) if separator else ("model", value)
        if name in models:
            raise ConfigError(f"Two models are called {name!r}. Give them names: NAME=FOLDER.")
        models[name] = Path(folder)
    return models


if __name__ == "__main__":
    run_main(main)
