"""What a task is: rows of a dataset, the text that a model sees of each, and how its answer is
judged.

A row goes through `preprocess` to one or more mappings with `inputs` and `targets`, T5's form, and
these become examples. An output and the targets go through `postprocess` to the values that metrics
compare. TASKS finds every file in eval/tasks.
"""

import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

import eval.tasks
from eval.scores.metrics import Metric
from moe import DataError, Registry

SPLITS = ("train", "validation", "test")

Row = Mapping[str, Any]
"""A row of a dataset: values by column."""

Features = dict[str, Any]
"""An example in T5's form: `inputs`, `targets`, and what its postprocessor needs, by name."""

Preprocess = Callable[[Row], list[Features]]
"""From a row to its examples."""

Postprocess = Callable[[str, Features, bool], Any]
"""(text, features, is_target) to the value that metrics compare; -1 stands for no valid answer."""


class Example(NamedTuple):
    """One example.

    Attributes:
        id: Unique within the split; a row that comes twice has `#2` behind it.
        group: Examples of one group are alike; they are resampled together.
        inputs: Text that the model sees.
        targets: Text that training teaches; `<unk>` when the label is hidden.
        choices: The answers to choose from; none for free text.
        fields: The preprocessed row, for `Task.postprocess`.
    """

    id: str
    group: str
    inputs: str
    targets: str
    choices: tuple[str, ...]
    fields: Features


class Decoding(NamedTuple):
    """How answers are generated.

    Attributes:
        max_tokens: Most tokens of an answer; T5 evaluates with 128.
        num_beams: 1 is greedy.
        alpha: Of the length penalty ((5 + length) / 6) ** alpha by which a beam's log-probability
            is divided.
    """

    max_tokens: int = 128
    num_beams: int = 1
    alpha: float = 0.0


GREEDY = Decoding()


class Source(Protocol):
    """Where rows come from."""

    @property
    def splits(self) -> Sequence[str]:
        """Those of SPLITS that there are."""
        ...

    @property
    def hidden(self) -> Sequence[str]:
        """Those whose labels the authors keep to themselves: predictions can be made of them,
        scores cannot.
        """
        ...

    def expected(self, split: str) -> int | None:
        """Returns how many rows a split has where it is published; None when that is not fixed."""
        ...

    def rows(
        self, split: str, folder: Path | None = None, revision: str | None = None
    ) -> Sequence[Row]:
        """Returns the rows of a split, from `folder` when it is given; checked.

        Raises:
            DataError: When they cannot be had, or are not what the task expects.
        """
        ...


@dataclass(frozen=True)
class Task:
    """A text-to-text task.

    Attributes:
        name: As on the command line.
        version: Grows when examples or scoring change, so that results are never mixed.
        description: One sentence: what goes in, what comes out, where the data are from.
        licence: Of the data.
        source: Where rows come from.
        preprocess: Makes of a row mappings with `inputs`, `targets` and what `postprocess` needs.
        postprocess: (text, fields, is_target) to the value that metrics compare; -1 for no valid
            answer.
        metrics: What answers are scored by.
        headline: Metrics whose mean is the task's score in an average; () for the first metric.
        choices: All targets of a classification, or a function of fields; () for free text.
        ids: Fields that tell an example from others; () for its number.
        groups: Fields that tell its group; () for each example its own.
        inputs_length: Most input tokens, end included.
        targets_length: Most target tokens in training, end included.
        decoding: How answers are generated.
        split: What is reported on: labels of others may be hidden.
        for_training: Another `preprocess` of the training split; None for the same.
        prompt_source: Where inputs and targets are from: `T5`, `this library`, or a published
            alternative.
        variant_of: The task of which this is another prompt; None for itself.
        family: Under which `python -m eval list` shows it.
    """

    name: str
    version: int
    description: str
    licence: str
    source: Source
    preprocess: Preprocess
    postprocess: Postprocess
    metrics: tuple[Metric, ...]
    headline: tuple[Metric, ...] = ()
    choices: tuple[str, ...] | Callable[[Features], tuple[str, ...]] = ()
    ids: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    inputs_length: int = 512
    targets_length: int = 62
    decoding: Decoding = GREEDY
    split: str = "validation"
    for_training: Preprocess | None = None
    prompt_source: str = "T5"
    variant_of: str | None = None
    family: str = "Offline"

    @property
    def is_classification(self) -> bool:
        """Whether every target is one of the same few choices."""
        return bool(self.choices) and not callable(self.choices)

    def headline_score(self, scores: Mapping[str, ArrayLike | None]) -> NDArray[np.float64]:
        """Returns the mean of the headline metrics: the task's score in an average.

        Args:
            scores: By metric, a number, None where it is not defined, or <float64>[R] draws.

        Returns:
            <float64>[] or <float64>[R] the score; NaN where a headline metric is not defined.
        """
        headline = self.headline or self.metrics[:1]
        values = [np.asarray(scores[metric.name], dtype=np.float64) for metric in headline]
        return np.mean(values, axis=0)

    def examples(
        self, split: str, folder: Path | None = None, revision: str | None = None
    ) -> list[Example]:
        """Returns the examples of `split`, one of SPLITS.

        Args:
            split: Which.
            folder: Holds a folder with the name of the task (of a variant: of the task that it
                varies), and in it files that take the place of the hub's.
            revision: Branch or commit on the hub in place of the task's.

        Raises:
            DataError: When there is no such split, or the rows are not what the task expects.
        """
        return self.examples_of(self.rows(split, folder, revision), split)

    def rows(
        self, split: str, folder: Path | None = None, revision: str | None = None
    ) -> Sequence[Row]:
        """Returns the rows of a split as they are published; arguments and errors are those of
        `examples`.
        """
        if split not in self.source.splits:
            raise DataError(
                f"There is no split {split!r} of {self.name}. Choose one of {', '.join(self.source.splits)}."
            )
        return self.source.rows(
            split, folder / (self.variant_of or self.name) if folder else None, revision
        )

    def examples_of(self, rows: Sequence[Row], split: str) -> list[Example]:
        """Returns the examples of rows of `split`."""
        preprocess = (
            self.for_training if split == "train" and self.for_training else self.preprocess
        )
        examples: list[Example] = []
        seen: Counter[str] = Counter()
        for fields in (made for row in rows for made in preprocess(row)):
            example = self._example(fields, len(examples))
            seen[example.id] += 1
            repeated = f"#{seen[example.id]}" if seen[example.id] > 1 else ""
            examples.append(example._replace(id=example.id + repeated))
        return examples

    def values(
        self, examples: Sequence[Example], outputs: Sequence[str]
    ) -> tuple[list[Any], list[Any]]:
        """Returns what metrics take: the values of the targets, and those of the outputs."""
        targets = [self.postprocess(example.targets, example.fields, True) for example in examples]
        answers = [
            self.postprocess(output, example.fields, False)
            for example, output in zip(examples, outputs, strict=True)
        ]
        return targets, answers

    def _example(self, fields: Features, number: int) -> Example:
        """Returns the example of a preprocessed row."""
        key = "/".join(str(fields[name]) for name in self.ids) or str(number)
        group = "/".join(str(fields[name]) for name in self.groups) or key
        choices = self.choices(fields) if callable(self.choices) else self.choices
        return Example(key, group, fields["inputs"], fields["targets"], choices, fields)


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


def register_task(task: Task) -> Task:
    """Adds a task to TASKS under its name, and returns it."""
    return TASKS.add(task.name, task)
