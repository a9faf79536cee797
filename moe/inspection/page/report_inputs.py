"""Reads the recipe and the metrics of runs for the report on routers."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from moe.checks import shown
from moe.errors import ConfigError, DataError
from moe.parsing import read_json_lines, read_yaml, to_record

Line = dict[str, float]
"""One line of a metrics.jsonl: the number of updates (`step`) and each measurement by name."""

LOSSES = ("train/ce_loss", "heldout/loss", "heldout/text_loss")
DEV_SCORE = "eval/mean"
"""Mean score of a fine-tuning on its dev examples, in percent."""

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
