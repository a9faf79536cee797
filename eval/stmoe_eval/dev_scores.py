"""Tasks for fine-tuning: their training pairs, and the scores of a model on their dev splits during
fine-tuning.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from moe.checkpoint.best_model import DevEvaluation
from moe.errors import ConfigError, DataError
from stmoe_eval.answers.batches import requests_of
from stmoe_eval.answers.data_ranks import DataRanks
from stmoe_eval.answers.predict import predict
from stmoe_eval.answers.seq2seq import load_seq2seq
from stmoe_eval.task import TASKS, Example, limit_examples

Pair = tuple[str, str]
"""Input and target text of a training example."""


class TaskData(NamedTuple):
    """Task data that fine-tuning reads.

    Attributes:
        train: Pairs of the training split, by task.
        dev: Examples of the validation split, of those tasks that have one.
    """

    train: dict[str, list[Pair]]
    dev: dict[str, list[Example]]

    def dev_pairs(self) -> list[Pair]:
        """Returns the pairs of the dev splits of all tasks."""
        pairs = []
        for examples in self.dev.values():
            pairs += [(example.inputs, example.targets) for example in examples]
        return pairs

    def scores(self, limit: int | None, ranks: DataRanks) -> DevEvaluation | None:
        """Returns a function that scores a model on the dev splits; None for a limit of 0.

        It returns scores in 0..100 by `TASK/METRIC`, and `mean`, the mean of the tasks' headline
        scores, which for the tasks of SuperGLUE is the leaderboard's average. Answers are generated
        with each task's decoding, e.g. beam search for summaries. Every rank must call it, and each
        gets the scores.

        Args:
            limit: Largest number of examples of a task; whole groups are taken, evenly. None for
                all.
            ranks: The ranks that predict.

        Raises:
            ConfigError: When no task has a dev split.
        """
        if limit == 0:
            return None
        if not self.dev:
            raise ConfigError(
                f"mixture.dev_examples is {limit}, and no task has a dev split. Set it to 0."
            )

        # The same examples at every evaluation of the run.
        dev = {name: limit_examples(examples, limit) for name, examples in self.dev.items()}

        def score_model(model: Path, folder: Path) -> dict[str, float]:
            system = load_seq2seq(model, ranks)
            scores: dict[str, float] = {}
            headline_scores: list[float] = []
            for name, examples in dev.items():
                task = TASKS.get(name)
                path = folder / f"{name}.jsonl"
                predicted = predict(system, task, requests_of(examples), "generate", path)
                task_scores = task.scores(examples, predicted.outputs)

                # Each metric under its own name, and one number for the mean.
                for metric, value in task_scores.items():
                    scores[f"{name}/{metric}"] = value
                headline_scores.append(float(task.headline_score(task_scores)))
            return {**scores, "mean": sum(headline_scores) / len(headline_scores)}

        return score_model


def read_tasks(names: Sequence[str], folder: str | None = None) -> TaskData:
    """Returns the training and dev examples of tasks.

    Args:
        names: Names of tasks.
        folder: Has a subfolder of files for each task, named after it; None for the tasks'
            own sources.

    Raises:
        ConfigError: When there is no such task; names the closest.
        DataError: When a task has no training examples, or rows cannot be had.
    """
    tasks = list(map(TASKS.get, names))
    rows = Path(folder) if folder else None
    if rows is not None and not rows.is_dir():
        raise DataError(
            f"mixture.folder is {rows}, which is not a folder. Give one that contains FOLDER/TASK/train.jsonl."
        )

    train: dict[str, list[Pair]] = {}
    dev: dict[str, list[Example]] = {}
    for task in tasks:
        examples = task.examples("train", rows)
        if not examples:
            raise DataError(
                f"Task {task.name!r} has no training examples. Leave it out, or give its training rows."
            )
        train[task.name] = [(example.inputs, example.targets) for example in examples]
        if "validation" in task.source.splits:
            dev[task.name] = task.examples("validation", rows)
    return TaskData(train, dev)
