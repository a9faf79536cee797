"""What a task is: examples with references, and the answers it accepts. TASKS finds every file in eval/tasks."""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import eval.tasks
from moe import DataError, Registry

SPLITS = ("train", "validation", "test")


class Example(NamedTuple):
    """One labelled example.

    Attributes:
        id: Unique within the task.
        group: Examples of one group are alike; they stay in one split and are resampled together.
        inputs: Text that the model sees.
        targets: Text that it should give.
    """

    id: str
    group: str
    inputs: str
    targets: str


@dataclass(frozen=True)
class Task:
    """A text-to-text task.

    Attributes:
        name: As on the command line.
        version: Grows when examples or scoring change, so that results are never mixed.
        description: One sentence: what goes in, what comes out, where the data are from.
        licence: Of the data.
        choices: All targets, for classification.
        load: Returns the examples of a split.
        max_target_tokens: Most tokens to generate.
    """

    name: str
    version: int
    description: str
    licence: str
    choices: tuple[str, ...]
    load: Callable[[str], list[Example]]
    max_target_tokens: int

    def examples(self, split: str) -> list[Example]:
        """Returns the examples of `split`, one of SPLITS.

        Raises:
            DataError: When there is no such split.
        """
        if split not in SPLITS:
            raise DataError(f"There is no split {split!r} of {self.name}. Choose one of {', '.join(SPLITS)}.")
        return self.load(split)


class _Tasks(Registry[Task]):
    """The registry of tasks; the files of eval/tasks are imported when it is first asked."""

    def get(self, name: str) -> Task:
        """Returns the task called `name`."""
        self._find()
        return super().get(name)

    def names(self) -> list[str]:
        """Returns the names of all tasks."""
        self._find()
        return super().names()

    def _find(self) -> None:
        """Imports every file of eval/tasks; each adds its tasks."""
        for module in pkgutil.iter_modules(eval.tasks.__path__):
            importlib.import_module(f"eval.tasks.{module.name}")


TASKS: Registry[Task] = _Tasks("task")
