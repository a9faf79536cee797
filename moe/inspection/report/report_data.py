"""The data of a report: how routers were traced, and metrics of runs and an evaluation as they are
read from their files.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, Field

from moe.checks import shown
from moe.errors import ConfigError, DataError
from moe.parsing import read_json_lines, read_record, read_yaml, to_record

Line = dict[str, float]
"""One line of a metrics.jsonl: `step`, and what was measured after so many updates, by name."""

LOSSES = ("train/ce_loss", "heldout/loss", "heldout/text_loss")
_PLOTTED = (*LOSSES, "heldout/token_accuracy", "router/encoder/entropy", "router/decoder/entropy")
_MAX_STEPS = 10**12
_MAX_VALUE = 1e30


# ---------------------------------------------------------------------------
# How routers were traced


class TracedText(NamedTuple):
    """The batches that were traced.

    Attributes:
        corpus: Folder of the corpus, whose held-out part was read.
        table: Documents, characters and licences of the corpus.
        num_documents: Number of held-out documents.
        num_tokens: Number of their tokens.
        num_chunks: Number of different examples that these tokens are split into.
        num_batches: Number of batches that were traced.
        batch_size: Examples in a batch.
        inputs_length: Encoder tokens of an example.
        targets_length: Decoder tokens of an example.
        masks: How much is masked, and the seed of the order and of the masks, in words.
        loss: Loss of the model on it, beside that of a unigram model, in words.
    """

    corpus: Path
    table: str
    num_documents: int
    num_tokens: int
    num_chunks: int
    num_batches: int
    batch_size: int
    inputs_length: int
    targets_length: int
    masks: str
    loss: str


class TracedModel(NamedTuple):
    """The model that was traced.

    Attributes:
        folder: Where it was loaded from.
        fingerprint: Tells its files from those of other models; an evaluation has the same one.
        device: The device that it ran on.
        recipe: The recipe.yaml of its run; None when none lies beside the model's folder.
    """

    folder: Path
    fingerprint: str
    device: str
    recipe: Path | None


def find_recipe(folder: Path) -> Path | None:
    """Returns the recipe of the run that holds a model in RUN/model or RUN/best/model, if any.

    Raises:
        ConfigError: When it is damaged.
    """
    parent = folder.absolute().parent
    runs = [parent]
    if parent.name == "best":
        runs.append(parent.parent)
    for run in runs:
        path = run / "recipe.yaml"
        if path.is_file():
            read_yaml(path)
            return path
    return None


# ---------------------------------------------------------------------------
# Metrics of runs


class Stage(NamedTuple):
    """Metrics of one run.

    Attributes:
        name: Name that the user gives it.
        path: Its metrics.jsonl.
        lines: What was measured, by ascending steps.
    """

    name: str
    path: Path
    lines: list[Line]

    def last(self, metric: str) -> Line | None:
        """Returns the last line that holds a metric; None when there is none."""
        for line in reversed(self.lines):
            if metric in line:
                return line
        return None

    def made(self, folder: Path) -> bool:
        """Returns whether the model in a folder is that of this run."""
        run = self.path.absolute().parent
        return folder.absolute() in (run / "model", run / "best/model")


def read_stages(arguments: Sequence[str]) -> list[Stage]:
    """Returns the metrics of runs, in the order given.

    Args:
        arguments: `NAME=FILE` each.

    Raises:
        ConfigError: When one has no name or no file, or two have the same name.
        DataError: When a file is no metrics.jsonl of one run; names the line.
    """
    stages: list[Stage] = []
    for argument in arguments:
        name, separator, file = argument.partition("=")
        if not separator or not name.strip() or not file.strip() or "\0" in file:
            raise ConfigError(
                f"--metrics {shown(argument)} has no name, or no file that can be. Write NAME=FILE, "
                "e.g. mine=runs/mine/metrics.jsonl."
            )
        if not name.isprintable():
            raise ConfigError(
                f"--metrics {shown(argument)}: the name has characters that cannot be shown. Choose another."
            )

        # A name is a heading of the page and a label in its figures.
        if name in [stage.name for stage in stages]:
            raise ConfigError(
                f"--metrics gives the name {shown(name)} twice. Give each run a name of its own."
            )
        path = Path(file)
        stages.append(Stage(name, path, _read_metrics(path)))
    return stages


def _read_metrics(path: Path) -> list[Line]:
    """Returns the lines of a metrics.jsonl.

    Raises:
        DataError: When it is another file, that of several runs, or holds nothing that is plotted.
    """
    advice = "Give the metrics.jsonl of a run."
    lines: list[Line] = []
    for number, values in read_json_lines(path, advice=advice, torn_end=True, nan=True):
        where = f"{path}, line {number}"
        if "stage" in values:
            raise DataError(
                f"{where} is of stage {shown(values['stage'])} of a job. Give each run's own metrics.jsonl."
            )

        # Steps are counts, and never fall within a run.
        step = values.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= _MAX_STEPS:
            raise DataError(
                f"{where}: step is {shown(step)}; expected a number of updates. {advice}"
            )
        if lines and step < lines[-1]["step"]:
            raise DataError(
                f"{where}: step {step} comes after step {lines[-1]['step']:.0f}. {advice}"
            )

        # Values that no plot can hold are damage.
        line = to_record(Line, values, where=where, advice=advice)
        for name, value in line.items():
            if math.isfinite(value) and abs(value) > _MAX_VALUE:
                raise DataError(
                    f"{where}: {shown(name)} is {value:g}; expected at most {_MAX_VALUE:g}. {advice}"
                )
        lines.append(line)

    if metric_names(lines).isdisjoint(_PLOTTED):
        raise DataError(f"{path} measures none of {', '.join(_PLOTTED)}. {advice}")
    return lines


def metric_names(lines: Sequence[Line]) -> set[str]:
    """Returns the names of all that was measured."""
    names: set[str] = set()
    for line in lines:
        names.update(line)
    return names


# ---------------------------------------------------------------------------
# An evaluation

# In percent, and down to -100 for a correlation; what is beyond is damage, but for rounding.
Percent = Annotated[float, Field(ge=-100.001, le=100.001)]


class Score(BaseModel, frozen=True):
    """A score and its 95 % interval; None where there is none."""

    metric: str
    value: Percent | None
    low: Percent | None
    high: Percent | None

    def overlaps(self, other: "Score") -> bool | None:
        """Returns whether the intervals of two scores overlap; None when one has none."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return None
        return self.low <= other.high and other.low <= self.high


class SystemScores(BaseModel, frozen=True):
    """What a system, i.e. a model or a baseline, scored in one way of answering."""

    name: str
    mode: str
    scores: list[Score] = Field(min_length=1)


class TaskScores(BaseModel, frozen=True):
    """The scores of one task."""

    task: str
    description: str
    split: str
    num_examples: Annotated[int, Field(ge=1, le=_MAX_STEPS)]
    num_groups: Annotated[int, Field(ge=1, le=_MAX_STEPS)]
    systems: list[SystemScores]


class EvaluatedModel(BaseModel, frozen=True):
    """A model that was evaluated."""

    folder: str
    fingerprint: str


class FailedTask(BaseModel, frozen=True):
    """A task that could not be scored."""

    task: str
    message: str


class Evaluation(BaseModel, frozen=True):
    """What a page shows of the report.json of `python -m eval run`; its other fields are not read."""

    models: dict[str, EvaluatedModel]
    tasks: list[TaskScores]
    failed: list[FailedTask] = []
    versions: dict[str, str] = {}


class ReadEvaluation(NamedTuple):
    """An evaluation, and where it was read."""

    path: Path
    content: Evaluation


def read_evaluation(path: Path) -> ReadEvaluation:
    """Returns an evaluation as the page shows it.

    Args:
        path: Its report.json, or the folder that it lies in.

    Raises:
        DataError: When it is missing, damaged or something else.
    """
    file = path / "report.json" if path.is_dir() else path
    advice = "Give the report.json of `python -m eval run`."
    return ReadEvaluation(file, read_record(file, Evaluation, advice=advice))
