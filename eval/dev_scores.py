"""Tasks for fine-tuning: their training pairs, and the scores of a model on their dev splits while
it is tuned.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eval.answers.data_ranks import DataRanks
from eval.answers.predict import predict
from eval.answers.seq2seq import load_seq2seq
from eval.reports.describe import task_score
from eval.run import requests_of, score, thin_out
from eval.task import TASKS, Example
from moe import ConfigError, DataError
from moe.checkpoint.best_model import DevEvaluation

Pair = tuple[str, str]


class TaskData(NamedTuple):
    """What fine-tuning reads of tasks.

    Attributes:
        train: Input and target texts of the training split, by task.
        dev: Examples of the validation split, of those tasks that have one.
    """

    train: dict[str, list[Pair]]
    dev: dict[str, list[Example]]

    def dev_pairs(self) -> list[Pair]:
        """Returns input and target texts of the dev splits of all tasks."""
        return [
            (example.inputs, example.targets)
            for examples in self.dev.values()
            for example in examples
        ]

    def scores(self, limit: int | None, ranks: DataRanks) -> DevEvaluation | None:
        """Returns what scores a model on the dev splits; None for a limit of 0.

        Answers are generated as each task says, by beams for summaries. `mean` is the mean of
        tasks: of each its first metric, in cb, multirc and record the mean of two, so that it is
        the leaderboard's for the tasks of SuperGLUE. Every rank must call it, and each gets the
        scores.

        Args:
            limit: Most examples of a task; whole groups are taken, evenly. None for all.
            ranks: Who predicts.

        Raises:
            ConfigError: When no task has a dev split.
        """
        if limit == 0:
            return None
        if not self.dev:
            raise ConfigError(
                f"mixture.dev_examples is {limit}, and no task has a dev split. Set it to 0."
            )
        taken = {name: thin_out(examples, limit) for name, examples in self.dev.items()}

        def scores(model: Path, folder: Path) -> dict[str, float]:
            system = load_seq2seq(model, ranks)
            by_metric: dict[str, float] = {}
            by_task: list[float] = []
            for name, examples in taken.items():
                task = TASKS.get(name)
                made = predict(
                    system, task, requests_of(examples), "generate", folder / f"{name}.jsonl"
                ).predictions
                found = score(task, examples, [prediction.output for prediction in made])
                by_metric |= {f"{name}/{metric}": value for metric, value in found.items()}
                by_task.append(task_score(name, list(found.values())))
            return {**by_metric, "mean": sum(by_task) / len(by_task)}

        return scores


def read_tasks(names: Sequence[str], folder: str | None = None) -> TaskData:
    """Returns the training and dev examples of tasks.

    Args:
        names: Of tasks.
        folder: Holds a folder of files for each task, called as the task is; None for the tasks'
            own sources.

    Raises:
        ConfigError: When there is no such task; names the closest.
        DataError: When a task has no training examples, or rows cannot be had.
    """
    tasks, data, rows = (
        [TASKS.get(name) for name in names],
        TaskData({}, {}),
        Path(folder) if folder else None,
    )
    if rows is not None and not rows.is_dir():
        raise DataError(
            f"mixture.folder is {rows}, which is no folder. Give one that holds FOLDER/TASK/train.jsonl."
        )
    for task in tasks:
        examples = task.examples("train", rows)
        if not examples:
            raise DataError(
                f"Task {task.name!r} has no training examples. Leave it out, or give its training rows."
            )
        data.train[task.name] = [(example.inputs, example.targets) for example in examples]
        if "validation" in task.source.splits:
            data.dev[task.name] = task.examples("validation", rows)
    return data
