"""stmoe eval list: the tasks as a table."""

from moe.cli import Parser
from moe.inspection.tables import format_table
from stmoe_eval.task import TASKS, Task

LEGEND = """\
train/validation/test: rows of the splits that there are; * is the one that is reported on, (labels are hidden) in ().
scores: the first is the headline. prompt: where inputs and targets are from.
--data FOLDER with FOLDER/TASK/SPLIT.jsonl or .parquet takes the place of the hub; a variant reads its task's folder."""

_HEADER = ("task", "version", "scores", "train/validation/test", "prompt", "data", "licence")

Cells = tuple[str, ...]
"""One line of the table."""


def build_parser() -> Parser:
    """Returns the parser of the command, which has no options."""
    return Parser(prog="stmoe eval list", description="Lists the tasks.")


def main(argv: list[str]) -> None:
    """Prints the table."""
    build_parser().parse_args(argv)
    print(format_tasks())


def format_tasks() -> str:
    """Returns a line for each task, by family, with a legend."""
    # Families and their tasks are in alphabetical order.
    families: dict[str, list[Task]] = {}
    for name in TASKS.names():
        task = TASKS.get(name)
        families.setdefault(task.family, []).append(task)

    lines: list[Cells] = []
    for family, tasks in sorted(families.items()):
        lines.append((family, *[""] * (len(_HEADER) - 1)))
        lines += map(_cells_of_task, tasks)
    return f"{format_table(_HEADER, lines)}\n\n{LEGEND}"


def _cells_of_task(task: Task) -> Cells:
    return (
        f"  {task.name}",
        str(task.version),
        ", ".join(metric.name for metric in task.metrics),
        "/".join(_format_split(task, split) for split in task.source.splits),
        task.prompt_source,
        task.source.origin,
        task.licence,
    )


def _format_split(task: Task, split: str) -> str:
    """Returns the number of rows of a split, or its name."""
    num_rows = task.source.expected(split)
    text = split if num_rows is None else f"{num_rows:,}"
    if split in task.source.hidden:
        text = f"({text})"
    return f"*{text}" if split == task.split else text
