"""The labels of a task that baselines are fitted to."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moe.checks import check_integer
from moe.data.mixture import choose_examples, format_choice
from moe.errors import ConfigError
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


def check_baselines(settings: BaselineSettings, tasks: Iterable[Task]) -> None:
    """Raises a ConfigError when a number is out of range, or a setting would change nothing."""
    check_integer("--train-examples", settings.train_examples, least=1, optional="none for all")
    most = 2**32 - 1
    check_integer("--train-seed", settings.train_seed, least=0, most=most, reason="it has 32 bits")
    if settings.train_seed and settings.train_examples is None:
        raise ConfigError(
            f"--train-seed {settings.train_seed} would change nothing: it draws the examples of "
            "--train-examples. Give both."
        )

    # No task would use them.
    if settings.train_examples is not None and not any(map(has_baselines, tasks)):
        raise ConfigError(
            f"--train-examples {settings.train_examples} would change nothing: no task has "
            "baselines, since each example brings its own choices. Remove the option."
        )


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
