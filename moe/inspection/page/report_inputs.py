"""Reads the metrics of runs and an evaluation for the report on routers."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, Field

from moe.checks import shown
from moe.errors import ConfigError, DataError
from moe.parsing import read_json_lines, read_record, read_yaml, to_record

Line = dict[str, float]
"""One line of a metrics.jsonl: the number of updates (`step`) and each measurement by name."""

LOSSES = ("train/ce_loss", "heldout/loss", "heldout/text_loss")
DEV_SCORE = "eval/mean"
"""Mean score of a fine-tuning on its dev examples, in percent."""

_SHOWN_ANSWERS = 12
_EVALUATION_ADVICE = "Give the report.json of `stmoe eval run`."

_PLOTTED = (
    *LOSSES,
    DEV_SCORE,
    "heldout/token_accuracy",
    "router/encoder/entropy",
    "router/decoder/entropy",
)


def find_recipe(folder: Path) -> Path | None:
    """Returns the recipe of the run that holds a model in RUN/model or RUN/best/model, if any.

    Raises:
        ConfigError: When it is damaged.
    """
    parent = folder.absolute().parent
    runs = [parent, parent.parent] if parent.name == "best" else [parent]
    for run in runs:
        path = run / "recipe.yaml"
        if path.is_file():
            read_yaml(path)
            return path
    return None


class Stage(NamedTuple):
    """Metrics of one run.

    Attributes:
        name: Name that the user gives it.
        path: Its metrics.jsonl.
        lines: Measurements, by ascending steps.
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

    def best_dev_line(self) -> Line | None:
        """Returns the first line with the best dev score; None when the run has none."""
        lines = [line for line in self.lines if math.isfinite(line.get(DEV_SCORE, math.nan))]
        return max(lines, key=lambda line: line[DEV_SCORE], default=None)

    def made(self, folder: Path) -> bool:
        """Returns whether this run made the model in a folder."""
        run = self.path.absolute().parent
        return folder.absolute() in (run / "model", run / "best/model")


def read_stages(arguments: Sequence[str]) -> list[Stage]:
    """Returns the metrics of runs, in the order given.

    Args:
        arguments: `NAME=FILE` each.

    Raises:
        ConfigError: When one has no name or no file, or two have the same name.
        DataError: When a file is not the metrics.jsonl of one run; names the line.
    """
    stages: dict[str, Stage] = {}
    for argument in arguments:
        # A name is a heading of the page and a label in its figures.
        name, _, file = argument.partition("=")
        if not name.strip() or not file.strip() or not argument.isprintable():
            raise ConfigError(
                f"--metrics is {shown(argument)}; expected NAME=FILE in printable characters, e.g. "
                "mine=runs/mine/metrics.jsonl."
            )
        if name in stages:
            raise ConfigError(
                f"--metrics gives the name {shown(name)} twice. Give each run a name of its own."
            )
        path = Path(file)
        stages[name] = Stage(name, path, _read_metrics(path))
    return list(stages.values())


def _read_metrics(path: Path) -> list[Line]:
    """Returns the lines of a metrics.jsonl.

    Raises:
        DataError: When it is a different kind of file, contains several runs, or has no plotted
            metrics.
    """
    advice = "Give the metrics.jsonl of a run."
    lines: list[Line] = []
    names: set[str] = set()
    for number, values in read_json_lines(path, advice=advice, torn_end=True, nan=True):
        where = f"{path}, line {number}"
        if "stage" in values:
            raise DataError(
                f"{where} is from stage {shown(values['stage'])} of a job. Give each run's own metrics.jsonl."
            )

        # Steps are counts, and never fall within a run.
        step = values.get("step")
        if type(step) is not int or step < 0:
            raise DataError(
                f"{where}: step is {shown(step)}; expected a number of updates. {advice}"
            )
        if lines and step < lines[-1]["step"]:
            raise DataError(
                f"{where}: step {step} comes after step {lines[-1]['step']:.0f}. {advice}"
            )
        lines.append(to_record(Line, values, where=where, advice=advice))
        names.update(values)

    if names.isdisjoint(_PLOTTED):
        raise DataError(f"{path} measures none of {', '.join(_PLOTTED)}. {advice}")
    return lines


# In percent, down to -100 for a correlation; values beyond the range (except for rounding) are damage.
Percent = Annotated[float, Field(ge=-100.001, le=100.001)]
Count = Annotated[int, Field(ge=1)]


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
    """Scores of a system, i.e. a model or a baseline, in one mode of answering."""

    name: str
    mode: str
    scores: list[Score] = Field(min_length=1)


class TaskScores(BaseModel, frozen=True):
    """The scores of one task, and some inputs with the first system's answer and the target."""

    task: str
    description: str
    split: str
    num_examples: Count
    num_groups: Count
    systems: list[SystemScores]
    answers: list[tuple[str, str, str]] = []


class EvaluatedModel(BaseModel, frozen=True):
    """A model that was evaluated."""

    folder: str
    fingerprint: str


class FailedTask(BaseModel, frozen=True):
    """A task that could not be scored."""

    task: str
    message: str


class Evaluation(BaseModel, frozen=True):
    """The fields of the report.json of `stmoe eval run` that the page shows."""

    models: dict[str, EvaluatedModel]
    tasks: list[TaskScores]
    failed: list[FailedTask] = []
    versions: dict[str, str] = {}


def read_evaluation(path: Path) -> Evaluation:
    """Returns the evaluation in a report.json.

    Args:
        path: Its report.json, or the folder that contains it.

    Raises:
        DataError: When it is missing, damaged or something else.
    """
    file = path / "report.json" if path.is_dir() else path
    evaluation = read_record(file, Evaluation, advice=_EVALUATION_ADVICE)
    tasks = []
    for task in evaluation.tasks:
        answers = _read_answers(file.parent, task)
        tasks.append(task.model_copy(update={"answers": answers}))
    return evaluation.model_copy(update={"tasks": tasks})


def read_evaluations(arguments: Sequence[str]) -> dict[str, Evaluation]:
    """Returns evaluations by name, in the order given.

    Args:
        arguments: `NAME=PATH` each, or PATH; see `read_evaluation`.

    Raises:
        ConfigError: When two have the same name.
        DataError: When one is missing, damaged or something else.
    """
    evaluations: dict[str, Evaluation] = {}
    for argument in arguments:
        name, separator, file = argument.partition("=")
        if not separator:
            name, file = "", argument
        if name in evaluations:
            raise ConfigError(
                f"--evaluation gives the name {shown(name)} twice. Give each one a name: NAME=PATH."
            )
        evaluations[name] = read_evaluation(Path(file))
    return evaluations


def _read_answers(folder: Path, task: TaskScores) -> list[tuple[str, str, str]]:
    """Returns some inputs, answers of the first system and targets, evenly spaced; none without its files."""
    system = task.systems[0]
    examples = folder / f"examples/{task.task}.jsonl"
    predictions = folder / f"predictions/{task.task}.{system.name}.{system.mode}.jsonl"
    if not examples.is_file() or not predictions.is_file():
        return []

    # Lines without an output close a batch.
    outputs = {}
    for _, line in read_json_lines(predictions, advice=_EVALUATION_ADVICE):
        if "output" in line:
            outputs[line["id"]] = line["output"]
    rows = []
    for _, line in read_json_lines(examples, advice=_EVALUATION_ADVICE):
        if line["id"] in outputs:
            rows.append((line["inputs"], outputs[line["id"]], line["targets"]))
    number = min(_SHOWN_ANSWERS, len(rows))
    return [rows[(2 * index + 1) * len(rows) // (2 * number)] for index in range(number)]
