"""The definition of a study: its runs, its measure and its comparisons.

`read_study` reads one from a YAML file. Comes before `runs`, which turns it into command lines.
"""

import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from moe.checks import check, check_number, is_kind
from moe.errors import ConfigError, did_you_mean
from moe.parsing import read_yaml, to_record

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,60}")
_ADVICE = "See docs/guides/study.md for the keys of a study."
_OWN_SETTINGS = ("seed", "seeds", "out", "resume")
_ACTIONS = ("help", "print_config")  # options that print and exit

SettingValue = str | int | float | bool | None | list[Any]
"""A value of a recipe, or of an option of the command."""


class Evaluation(NamedTuple):
    """Evaluation of a finished run on a task of eval/.

    Attributes:
        task: Name of the task.
        split: Split that is scored.
        mode: `rank` or `generate`.
        model: `best` for the model with the best dev score, `last` for the last one.
    """

    task: str
    split: Literal["train", "validation", "test"] = "test"
    mode: Literal["rank", "generate"] = "rank"
    model: Literal["best", "last"] = "last"


class Measure(NamedTuple):
    """The one number of a run, and of an arm with a seed.

    Attributes:
        metric: Name in metrics.jsonl, or with `evaluate`, the name of a task metric.
        at: `last` or `best` of its values in the run.
        better: Whether a `lower` or a `higher` number is better.
        curve: Metric of the curves; the metric itself if empty.
        unit: Unit of the number, e.g. nats, printed after differences.
    """

    metric: str
    at: Literal["last", "best"] = "last"
    better: Literal["lower", "higher"] = "lower"
    curve: str = ""
    unit: str = ""

    @property
    def value_unit(self) -> str:
        """Unit of a number itself: percentages differ by points."""
        return "%" if self.unit == "points" else self.unit


class Contrast(NamedTuple):
    """Two arms to compare.

    Attributes:
        arm: Name of the first arm.
        against: Name of the other arm.
        expect: Expected result of the first arm: `better`, `worse` or `equal`.
        margin: Differences within it count as zero.
    """

    arm: str
    against: str
    expect: Literal["better", "worse", "equal"] = "better"
    margin: float = 0.01


class Study(NamedTuple):
    """A grid of runs, and the question that it answers.

    Attributes:
        title: Short name of the subject.
        claim: The paper's claim, as one sentence.
        paper: The paper's own figures, with their place.
        expected: What was expected here before the first run.
        command: `pretrain` or `finetune`: the command that makes a run.
        settings: Settings of all runs: `config`, other options of the command, and dotted settings
            of the recipe. A text may hold {seed}, {out}, the folder of the study, and {studies},
            the folder around it.
        arms: Settings of each arm, on top of those.
        seeds: Seeds of every arm.
        measure: The number that is compared.
        primary: The one difference that was declared before the runs.
        contrasts: Additional comparisons, whose p-values are corrected together.
        evaluate: How a finished run is scored; None where the metric is one of training.
        plot_over: A setting that is a number in every arm, over which the arms are drawn; those
            whose names differ by `-NUMBER` alone are one line. Empty for no figure.
        cost: Expected cost of the runs, in words; printed before they begin.
    """

    title: str
    claim: str
    paper: str
    expected: str
    command: Literal["pretrain", "finetune"]
    settings: dict[str, SettingValue]
    arms: dict[str, dict[str, SettingValue]]
    seeds: list[int]
    measure: Measure
    primary: Contrast
    contrasts: list[Contrast] = []  # noqa: RUF012  never changed
    evaluate: Evaluation | None = None
    plot_over: str = ""
    cost: str = ""


def read_study(path: Path) -> Study:
    """Returns the study of a YAML file; the paths of recipes in it are relative to the file.

    Raises:
        ConfigError: When the file cannot be read, or a key is missing, unknown or wrong.
    """
    content = read_yaml(path)
    study = to_record(Study, content, where=str(path), advice=_ADVICE, error=ConfigError)
    try:
        _check_study(study)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error

    # Recipe paths are relative to the file that names them.
    for settings in (study.settings, *study.arms.values()):
        if "config" in settings:
            settings["config"] = str(path.parent / str(settings["config"]))
    return study


def _check_study(study: Study) -> None:
    """Raises unless the arms, seeds and comparisons of a study go together."""
    check(bool(study.arms), "arms", study.arms, "at least one arm with its settings")
    for name in study.arms:
        is_name = _NAME.fullmatch(name) is not None
        check(is_name, "arms", name, "names of lower-case letters, digits, dots and dashes")

    # Every run has its own folder, named after its seed.
    seeds = study.seeds
    are_seeds = bool(seeds) and len(set(seeds)) == len(seeds) and min(seeds) >= 0
    check(are_seeds, "seeds", seeds, "one or more different numbers of at least 0")
    for settings in (study.settings, *study.arms.values()):
        for name in settings:
            check_setting_name(name)

    # The x-axis of the curves must be numeric.
    if study.plot_over:
        for name, settings in study.arms.items():
            value = settings.get(study.plot_over)
            expected = f"a number in arm {name}: plot_over draws the arms over it"
            check(is_kind(value, float), study.plot_over, value, expected)

    # Compared arms must exist.
    for contrast in (study.primary, *study.contrasts):
        _check_contrast(study, contrast)


def check_setting_name(name: str) -> None:
    """Raises a ConfigError for a name that a study may not set."""
    if name in _OWN_SETTINGS:
        raise ConfigError(f"{name} is set by the study itself. Remove it.")
    if name in _ACTIONS:
        raise ConfigError(f"{name} is not a setting: --{name} prints and exits. Remove it.")


def _check_contrast(study: Study, contrast: Contrast) -> None:
    """Raises unless the arms of a contrast belong to the study."""
    for name in (contrast.arm, contrast.against):
        if name not in study.arms:
            known = ", ".join(study.arms)
            closest = did_you_mean(name, study.arms)
            raise ConfigError(f"There is no arm {name!r} to compare.{closest} Known: {known}.")
    if contrast.arm == contrast.against:
        raise ConfigError(f"Arm {contrast.arm!r} is compared with itself. Give two different arms.")
    check_number("margin", contrast.margin, above=0)
