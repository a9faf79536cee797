"""stmoe inspect: see, replay and edit what the routers of a model do; a table of verbs.

stmoe inspect record --model runs/demo/model --corpus runs/demo/corpus --out runs/trace
stmoe inspect report --model runs/demo/model --corpus runs/demo/corpus --out report.html
"""

import importlib
import sys

from moe.commands.routing_inputs import TaskReader
from moe.errors import ConfigError, did_you_mean

VERBS = {
    "record": "write down which expert every token of a text goes to",
    "view": "show a trace: an interactive page, and tables with their significance",
    "ablate": "say what the loss becomes without each expert, and what experts are for",
    "compare": "compare the routing of two models on the text of a trace",
    "replay": "run a model with the routing of a trace",
    "report": "explain the routers on held-out text, with the training that made them",
}


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

    name = argv[0]
    if name not in VERBS:
        raise ConfigError(
            f"stmoe inspect has no verb {name!r}.{did_you_mean(name, VERBS)} stmoe inspect --help lists all of them."
        )
    module = importlib.import_module(f"moe.commands.inspect_{name}")
    module.main(argv[1:], read_task)


def _help() -> str:
    lines = ["usage: stmoe inspect VERB [OPTION ...]", ""]
    for name, summary in VERBS.items():
        lines.append(f"  {name:<9}{summary}")
    lines += ["", "stmoe inspect VERB --help explains the options of a verb."]
    return "\n".join(lines)
