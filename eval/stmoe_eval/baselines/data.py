"""The labels of a task that baselines are fitted to."""

from dataclasses import dataclass
from pathlib import Path

from moe.data.mixture import choose_examples, format_choice
from stmoe_eval.baselines.classifiers import BaselineData, has_baselines
from stmoe_eval.task import Task


@dataclass(frozen=True)
class BaselineSettings:
    """Data that the baselines may use.

    Attributes:
        train_examples: Largest number of training examples of a task; with the same seed, the same
            ones as fine-tuning with `mixture.train_examples`. None for all.
        train_seed: Seed of the choice.
    """

    train_examples: int | None = None
    train_seed: int = 0


def read_baseline_data(
    task: Task, settings: BaselineSettings, folder: Path | None
) -> BaselineData | None:
    """Returns the training data of a task's baselines; None where it has none, or no labels.

    Rows from the hub are not loaded for baselines, since there may be many.

    Args:
        task: The task.
        settings: Data that the baselines may use.
        folder: Holds a folder TASK with files in place of the task's own rows; None for those.

    Raises:
        DataError: When the training rows are not what the task expects.
    """
    if not has_baselines(task):
        return None
    rows_folder = task.rows_folder(folder)
    if not task.source.is_local("train", rows_folder):
        return None

    # The labels that the baselines may use.
    examples = task.examples("train", folder)
    size = settings.train_examples
    train = choose_examples(examples, size, settings.train_seed)
    fitted_to = format_choice(len(train), len(examples), size, settings.train_seed)
    return BaselineData(train, fitted_to)
