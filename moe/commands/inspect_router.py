"""stmoe inspect: see, replay and edit what the routers of a model do; a table of verbs.

stmoe inspect record --model runs/demo/model --corpus runs/demo/corpus --out runs/trace
stmoe inspect report --model runs/demo/model --corpus runs/demo/corpus --out report.html
"""

import sys

from moe.commands.routing_inputs import TaskReader
from moe.commands.stmoe import Verb, verb_lines, verb_main

VERBS = {
    "record": Verb("inspect_record", "record the experts of every token of a text"),
    "view": Verb(
        "inspect_view", "show a trace: an interactive page, and tables with their significance"
    ),
    "ablate": Verb(
        "inspect_ablate", "measure the loss without each expert, and what each expert serves"
    ),
    "compare": Verb("inspect_compare", "compare the routing of two models on the text of a trace"),
    "replay": Verb("inspect_replay", "run a model with the routing of a trace"),
    "report": Verb(
        "inspect_report", "explain the routers on held-out text, with the training that made them"
    ),
}

_READ_TASKS = ("record",)


def main(argv: list[str], read_task: TaskReader | None = None) -> None:
    """Runs the verb that the arguments begin with.

    Args:
        argv: A verb and its options.
        read_task: Reads the pairs of a task of eval/; None where there is none.

    Raises:
        ConfigError: When there is no such verb.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        sys.exit(0)

    # Tasks are read only where something is recorded.
    name = argv[0]
    run = verb_main("stmoe inspect", name, VERBS)
    further = [read_task] if name in _READ_TASKS else []
    run(argv[1:], *further)


def _help() -> str:
    lines = ["usage: stmoe inspect VERB [OPTION ...]", "", *verb_lines(VERBS), ""]
    return "\n".join([*lines, "stmoe inspect VERB --help explains the options of a verb."])
