"""Builds a corpus: `stmoe corpus`, which here knows the tasks of eval/. See moe/commands/build_corpus.py.

python -m scripts.build_corpus --out runs/corpus --unseen docstring_summary
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

from eval.task import TASKS
from moe.cli import run_main
from moe.commands import build_corpus
from moe.commands.build_corpus import UnseenTask


def unseen_task(name: str) -> UnseenTask:
    """Returns what of a task must stay unseen: its validation and test examples."""
    task = TASKS.get(name)
    sources: set[str] = set()
    inputs: dict[str, list[str]] = {}
    for split in ("validation", "test"):
        if split not in task.source.splits:
            continue
        examples = task.examples(split)
        sources |= {example.group for example in examples}
        inputs[split] = [example.inputs for example in examples]
    return UnseenTask(name, sources, inputs)


def main(argv: list[str]) -> None:
    """Builds, saves and describes a corpus."""
    build_corpus.main(argv, unseen_task)


if __name__ == "__main__":
    run_main(main)
