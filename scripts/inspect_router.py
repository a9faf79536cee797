"""See, replay and edit what routers do: `stmoe inspect`, which here knows the tasks of eval/.

See moe/commands/inspect_router.py.

python -m scripts.inspect_router record --model runs/demo/model --task docstring_topic --out runs/trace
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

from eval.task import TASKS
from moe.cli import run_main
from moe.commands import inspect_router
from moe.tracing.examples import SourceText


def read_task(name: str, split: str) -> list[SourceText]:
    """Returns the pairs of a split of a task of eval/; examples of a group are of one document."""
    documents: dict[str, int] = {}
    pairs = []
    for example in TASKS.get(name).examples(split):
        document = documents.setdefault(example.group, len(documents))
        pairs.append(SourceText(example.inputs, example.targets, document, name))
    return pairs


def main(argv: list[str]) -> None:
    """Runs a verb of `stmoe inspect`."""
    inspect_router.main(argv, read_task)


if __name__ == "__main__":
    run_main(main)
