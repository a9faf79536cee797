"""A task: rows of a dataset, their text for a model, and the scoring of answers.

A row goes through `preprocess` to one or more mappings with `inputs` and `targets`, T5's form, and
these become examples. An output and the targets go through `postprocess` to the values that metrics
compare. TASKS finds every file in eval/stmoe_eval/tasks.
"""

import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe.checks import shown
from moe.errors import DataError
from moe.registry import Registry
from stmoe_eval.scores.metrics import Metric
from stmoe_eval.source import SPLITS as SPLITS
from stmoe_eval.source import BuiltIn, HubData
from stmoe_eval.source import Row as Row
from stmoe_eval.submission import SubmissionFile

_TASKS_FOLDER = Path(__file__).with_name("tasks")

Features = dict[str, Any]
"""An example in T5's form: `inputs`, `targets`, and what its postprocessor needs, by name."""

Preprocess = Callable[[Row], list[Features]]
"""From a row to its examples."""

Postprocess = Callable[[str, Features, bool], Any]
"""(text, features, is_target) to the value that metrics compare; -1 means no valid answer."""


class Example(NamedTuple):
    """One example of a task.

    Attributes:
        id: Unique within the split; a repeated row gets the suffix `#2`.
        group: Examples of one group depend on each other; they are resampled together.
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
        max_tokens: Maximum number of tokens of an answer; T5 evaluates with 128.
        num_beams: Beams of the search; 1 is greedy decoding.
        alpha: Strength of the length penalty ((5 + length) / 6) ** alpha by which a beam's
            log-probability is divided.
    """

    max_tokens: int = 128
    num_beams: int = 1
    alpha: float = 0.0


GREEDY = Decoding()


class MetricInputs(NamedTuple):
    """Values that metrics compare, for each example.

    Attributes:
        targets: Values of the targets.
        answers: Values of the outputs.
    """

    targets: list[Any]
    answers: list[Any]


@dataclass(frozen=True)
class Task:
    """A text-to-text task.

    Attributes:
        name: Name on the command line.
        version: Grows when examples or scoring change, so that results are never mixed.
        description: One sentence: the input, the output and the source of the data.
        licence: License of the data.
        source: Where rows come from.
        preprocess: Converts a row to mappings with `inputs`, `targets` and what `postprocess`
            needs.
        postprocess: (text, fields, is_target) to the value that metrics compare; -1 if the answer
            is invalid.
        metrics: Metrics for scoring answers.
        headline: Metrics whose mean is the task's score in an average; () for the first metric.
        choices: All targets of a classification, or a function of fields; () for free text.
        ids: Fields that identify an example; () for its number.
        groups: Fields that identify its group; () if each example is its own group.
        inputs_length: Maximum number of input tokens, end included.
        targets_length: Maximum number of target tokens in training, end included.
        decoding: How answers are generated.
        split: Split to report on; labels of others may be hidden.
        for_training: Another `preprocess` of the training split; None for the same.
        prompt_source: Source of inputs and targets: `T5`, `this library`, or a published
            alternative.
        variant_of: The task of which this is a variant prompt; None for itself.
        submission: The file of the test split that its benchmark's site takes; None for none.
        family: Heading in `stmoe eval list`.
    """

    name: str
    version: int
    description: str
    licence: str
    source: BuiltIn | HubData

    # From rows to texts, from texts to scores.
    preprocess: Preprocess
    postprocess: Postprocess
    metrics: tuple[Metric, ...]
    headline: tuple[Metric, ...] = ()
    choices: tuple[str, ...] | Callable[[Features], tuple[str, ...]] = ()

    # Names of features, joined by slashes.
    ids: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    # T5's settings.
    inputs_length: int = 512
    targets_length: int = 62
    decoding: Decoding = GREEDY
    split: str = "validation"
    for_training: Preprocess | None = None

    # For people who compare results.
    prompt_source: str = "T5"
    variant_of: str | None = None
    submission: SubmissionFile | None = None
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
            <float64>[] or <float64>[R] the score; NaN if a headline metric is not defined.
        """
        values: list[NDArray[np.float64]] = []
        for metric in self.headline or self.metrics[:1]:
            values.append(np.asarray(scores[metric.name], dtype=np.float64))
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
            DataError: When there is no such split, or the rows are not valid for the task.
        """
        return self.examples_of(self.rows(split, folder, revision), split)

    def rows(
        self, split: str, folder: Path | None = None, revision: str | None = None
    ) -> Sequence[Row]:
        """Returns the rows of a split; arguments and errors are those of `examples`."""
        splits = self.source.splits
        if split not in splits:
            raise DataError(
                f"There is no split {split!r} of {self.name}. Choose one of {', '.join(splits)}."
            )
        return self.source.rows(split, self.rows_folder(folder), revision)

    def rows_folder(self, folder: Path | None) -> Path | None:
        """Returns the folder of the task's rows in a folder of all tasks; None for none."""
        return None if folder is None else folder / (self.variant_of or self.name)

    def examples_of(self, rows: Sequence[Row], split: str) -> list[Example]:
        """Returns the examples of rows of `split`.

        Raises:
            DataError: When two examples of another split than the training split have one id.
        """
        preprocess = self.preprocess
        if split == "train" and self.for_training is not None:
            preprocess = self.for_training

        examples: list[Example] = []
        num_seen: Counter[str] = Counter()
        for row in rows:
            for features in preprocess(row):
                example = self._to_example(features, number=len(examples))

                # In training a row may be repeated; ids are unique all the same.
                num_seen[example.id] += 1
                if num_seen[example.id] > 1:
                    if split != "train":
                        raise DataError(self._repeated_id(example.id, split))
                    example = example._replace(id=f"{example.id}#{num_seen[example.id]}")
                examples.append(example)
        return examples

    def values(self, examples: Sequence[Example], outputs: Sequence[str]) -> MetricInputs:
        """Returns the values that metrics compare."""
        inputs = MetricInputs([], [])
        for example, output in zip(examples, outputs, strict=True):
            inputs.targets.append(self.postprocess(example.targets, example.fields, True))
            inputs.answers.append(self.postprocess(output, example.fields, False))
        return inputs

    def scores(self, examples: Sequence[Example], outputs: Sequence[str]) -> dict[str, float]:
        """Returns the score of every metric, without intervals; NaN where no example counts."""
        targets, answers = self.values(examples, outputs)
        return {metric.name: metric.score(targets, answers) for metric in self.metrics}

    def _repeated_id(self, example_id: str, split: str) -> str:
        """Returns a description of two examples with the same id."""
        return (
            f"Two examples of {self.name} have the id {shown(example_id)} in split {split!r}. "
            f"Remove the repeated row, or give each row {' and '.join(self.ids)} of its own."
        )

    def _to_example(self, features: Features, number: int) -> Example:
        """Returns the example of a preprocessed row."""
        key = _join_fields(features, self.ids) or str(number)
        return Example(
            id=key,
            group=_join_fields(features, self.groups) or key,
            inputs=features["inputs"],
            targets=features["targets"],
            choices=self.choices(features) if callable(self.choices) else self.choices,
            fields=features,
        )


def _join_fields(features: Features, names: Sequence[str]) -> str:
    return "/".join(str(features[name]) for name in names)


def limit_examples(examples: Sequence[Example], limit: int | None) -> list[Example]:
    """Returns at most `limit` examples: whole groups, evenly spaced, and at least one group."""
    if limit is None or limit >= len(examples):
        return list(examples)

    numbers_by_group: dict[str, list[int]] = {}
    for number, example in enumerate(examples):
        numbers_by_group.setdefault(example.group, []).append(number)
    groups = list(numbers_by_group.values())

    # The most groups that hold no more examples than the limit.
    for num_groups in range(min(len(groups), limit), 0, -1):
        numbers: list[int] = []
        for index in range(num_groups):
            numbers += groups[index * len(groups) // num_groups]
        if len(numbers) <= limit or num_groups == 1:
            return [examples[number] for number in sorted(numbers)]
    return []


# ---------------------------------------------------------------------------
# The registry


class _Tasks(Registry[Task]):
    """The registry of tasks; the files of eval/stmoe_eval/tasks are imported at the first access."""

    def get(self, name: str) -> Task:
        """Returns the task called `name`."""
        self._find()
        return super().get(name)

    def names(self) -> list[str]:
        """Returns the names of all tasks."""
        self._find()
        return super().names()

    def _find(self) -> None:
        """Imports every file of eval/stmoe_eval/tasks; each adds its tasks."""
        for module in pkgutil.iter_modules([str(_TASKS_FOLDER)]):
            importlib.import_module(f"stmoe_eval.tasks.{module.name}")


TASKS: Registry[Task] = _Tasks("task")


def register_task(task: Task) -> Task:
    """Adds a task to TASKS under its name, and returns it."""
    return TASKS.add(task.name, task)
