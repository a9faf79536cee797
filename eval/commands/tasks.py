"""The tasks as a table: python -m eval list."""

from collections.abc import Iterable

from eval.source import HubData
from eval.task import TASKS, Task

LEGEND = """\
train/validation/test: rows of the splits that there are; * is the one that is reported on, (labels are hidden) in ().
scores: the first is the headline. prompt: where inputs and targets are from.
--data FOLDER with FOLDER/TASK/SPLIT.jsonl or .parquet takes the place of the hub; a variant reads its task's folder."""
_HEAD: tuple[str, ...] = (
    "task",
    "version",
    "scores",
    "train/validation/test",
    "prompt",
    "data",
    "licence",
)


def tasks_table() -> str:
    """Returns a line a task, by family, with a legend."""
    families: dict[str, list[Task]] = {}
    for task in map(TASKS.get, TASKS.names()):
        families.setdefault(task.family, []).append(task)
    lines = [_HEAD]
    for family, tasks in sorted(families.items()):
        lines.append((family, *[""] * (len(_HEAD) - 1)))
        lines += map(_line, tasks)
    return f"{_aligned(lines)}\n\n{LEGEND}"


def _line(task: Task) -> tuple[str, ...]:
    """Returns the cells of a task."""
    scores = ", ".join(metric.name for metric in task.metrics)
    data = "this Python installation"
    if isinstance(task.source, HubData):
        data = f"{task.source.repository} {task.source.config}"
    splits = "/".join(_split(task, split) for split in task.source.splits)
    return (
        f"  {task.name}",
        str(task.version),
        scores,
        splits,
        task.prompt_source,
        data,
        task.licence,
    )


def _split(task: Task, split: str) -> str:
    """Returns the number of rows of a split, or its name."""
    expected = task.source.expected(split)
    text = f"{expected:,}" if expected is not None else split
    text = f"({text})" if split in task.source.hidden else text
    return f"*{text}" if split == task.split else text


def _aligned(lines: Iterable[tuple[str, ...]]) -> str:
    """Returns lines of cells with columns as wide as their widest cell."""
    lines = list(lines)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
