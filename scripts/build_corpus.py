"""Builds a corpus: `stmoe corpus`, which here knows the tasks of eval/. See moe/commands/build_corpus.py.

python -m scripts.build_corpus --out runs/corpus --unseen docstring_summary
"""

if __name__ == "__main__":  # before the imports that take seconds
    from eval.start import answer_interrupts

    answer_interrupts()

from eval.task import TASKS
from moe.cli import run_main
from moe.commands import build_corpus


def evaluation_files(task: str) -> set[str]:
    """Returns the files that the validation and test examples of a task are from."""
    files: set[str] = set()
    for split in ("validation", "test"):
        for example in TASKS.get(task).examples(split):
            files.add(example.group)
    return files


def main(argv: list[str]) -> None:
    """Builds, saves and describes a corpus."""
    build_corpus.main(argv, evaluation_files)


if __name__ == "__main__":
    run_main(main)
