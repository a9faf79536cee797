"""Reads the recipe and the metrics of runs for the report on routers."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from moe.checks import shown
from moe.errors import ConfigError, DataError
from moe.parsing import read_json_lines, to_record

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
    """Returns the recipe of the run that holds a model in RUN/model or RUN/best/model, if any."""
    parent = folder.absolute().parent
    run = parent.parent if parent.name == "best" else parent
    recipes = [path for path in (parent / "recipe.yaml", run / "recipe.yaml") if path.is_file()]
    return recipes[0] if recipes else None


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


def named_paths(option: str, arguments: Sequence[str]) -> dict[str, Path]:
    """Returns the paths of an option by name, in the order given; the name of a PATH alone is empty.

    Args:
        option: Name of the option, for messages.
        arguments: `NAME=PATH` each, or PATH.

    Raises:
        ConfigError: When two have the same name, or one cannot be printed.
    """
    paths: dict[str, Path] = {}
    for argument in arguments:
        # A name is a heading of the page and a label in its figures.
        name, separator, path = argument.partition("=")
        if not separator:
            name, path = "", argument
        if name in paths or not argument.isprintable():
            raise ConfigError(
                f"{option} is {shown(argument)}; expected NAME=PATH in printable characters, each name once."
            )
        paths[name] = Path(path)
    return paths


def read_stages(arguments: Sequence[str]) -> list[Stage]:
    """Returns the metrics of runs, in the order given.

    Args:
        arguments: `NAME=FILE` each.

    Raises:
        ConfigError: When two have the same name.
        DataError: When a file is not the metrics.jsonl of a run; names the line.
    """
    advice = "Give the metrics.jsonl of a run."
    stages = []
    for name, path in named_paths("--metrics", arguments).items():
        if not name.strip():
            raise ConfigError(f"--metrics is {path}; expected NAME=FILE, e.g. mine={path}.")
        lines: list[Line] = []
        for number, values in read_json_lines(path, advice=advice, torn_end=True, nan=True):
            where = f"{path}, line {number}"
            lines.append(to_record(Line, values, where=where, advice=advice))
            if "step" not in values:
                raise DataError(f"{where} has no step. {advice}")
            if len(lines) > 1 and values["step"] < lines[-2]["step"]:
                raise DataError(f"{where}: step {values['step']} comes after a later one. {advice}")
        names = {metric for line in lines for metric in line}
        if names.isdisjoint(_PLOTTED):
            raise DataError(f"{path} measures none of {', '.join(_PLOTTED)}. {advice}")
        stages.append(Stage(name, path, lines))
    return stages
