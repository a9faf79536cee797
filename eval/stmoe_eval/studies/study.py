"""A study: a grid of training runs over arms and seeds, and the comparisons that it was made for.

`read_study` reads one from a YAML file, `study_runs` gives the command of each run. Comes before
`processes`, which starts the commands.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from moe.commands.finetune import finetune_command
from moe.commands.pretrain import pretrain_command
from moe.errors import ConfigError, did_you_mean
from moe.parsing import read_yaml, to_record

_COMMANDS = {"pretrain": pretrain_command, "finetune": finetune_command}
_ADVICE = "See docs/guides/evaluate.md for an example of a study."
_OWN_SETTINGS = ("seed", "seeds", "out", "resume", "help", "print_config")

Setting = str | int | float | bool | None | list[Any]
"""A value of a recipe, or of an option of the command."""


class Measure(NamedTuple):
    """The one number of a run.

    Attributes:
        metric: Name in metrics.jsonl, whose last value counts.
        better: Whether a `lower` or a `higher` number is better.
        unit: Unit of differences, e.g. nats, or points of percentages.
    """

    metric: str
    better: Literal["lower", "higher"] = "lower"
    unit: str = ""


class Contrast(NamedTuple):
    """Two arms to compare.

    Attributes:
        arm: Name of the first arm.
        against: Name of the other arm.
        expect: Expected result of the first arm.
        margin: Differences within it count as zero.
    """

    arm: str
    against: str
    expect: Literal["better", "worse", "equal"] = "better"
    margin: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.01


class Study(NamedTuple):
    """A grid of runs, and the question that it answers.

    Attributes:
        title: Short name of the subject.
        claim: The paper's claim, as one sentence.
        paper: The paper's own figures, with their place.
        expected: What was expected here before the first run.
        command: The command that makes a run.
        settings: Settings of all runs: `config`, other options of the command, and dotted settings
            of the recipe. {studies} in a text is the folder around that of the study.
        arms: Settings of each arm, on top of those.
        seeds: Seeds of every arm.
        measure: The number that is compared.
        primary: The one difference that was declared before the runs.
        contrasts: Further comparisons, whose p-values are corrected together.
        cost: Expected cost of the runs, in words; printed before they begin.
    """

    title: str
    claim: str
    paper: str
    expected: str
    command: Literal["pretrain", "finetune"]
    settings: dict[str, Setting]
    arms: dict[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")], dict[str, Setting]]
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    measure: Measure
    primary: Contrast
    contrasts: list[Contrast] = []  # noqa: RUF012  never changed
    cost: str = ""


class StudyRun(NamedTuple):
    """One run of a study.

    Attributes:
        arm: Name of the arm.
        seed: Seed of the run.
        folder: Folder of the run.
        argv: Verb and options of `stmoe` that make the run, or resume it.
    """

    arm: str
    seed: int
    folder: Path
    argv: list[str]

    @property
    def name(self) -> str:
        """Arm and seed, as in messages."""
        return f"{self.arm}, seed {self.seed}"

    @property
    def is_complete(self) -> bool:
        """Whether the run has written its last model."""
        return (self.folder / "model").exists()


def read_study(path: Path) -> Study:
    """Returns the study of a YAML file; the paths of recipes in it are relative to the file.

    Raises:
        ConfigError: When the file cannot be read, a key is missing, unknown or wrong, or a
            comparison names no arm.
    """
    content = read_yaml(path)
    study = to_record(Study, content, where=str(path), advice=_ADVICE, error=ConfigError)
    for contrast in (study.primary, *study.contrasts):
        for name in (contrast.arm, contrast.against):
            if name not in study.arms:
                closest = did_you_mean(name, study.arms)
                raise ConfigError(f"{path}: there is no arm {name!r} to compare.{closest}")

    for settings in (study.settings, *study.arms.values()):
        for name in _OWN_SETTINGS:
            if name in settings:
                raise ConfigError(f"{path}: {name} cannot be set by a study. Remove it.")
        if "config" in settings:
            settings["config"] = str(path.parent / str(settings["config"]))
    return study


def study_runs(study: Study, out: Path) -> list[StudyRun]:
    """Returns the runs of a study, those of the first seed first.

    So a study that is stopped early has as many complete seeds as possible.

    Args:
        study: The study.
        out: Its folder.

    Raises:
        ConfigError: When a setting is unknown or wrong; names the arm.
    """
    # One parser for all runs, since building it takes longer than using it.
    command = _COMMANDS[study.command]()
    runs = []
    for seed in study.seeds:
        for arm in study.arms:
            folder = out / "runs" / arm / f"seed-{seed}"
            argv = _options({**study.settings, **study.arms[arm]}, out.parent)
            argv += ["--seed", str(seed), "--out", str(folder)]

            # Errors in settings are found before any run begins.
            try:
                command.parse(argv)
            except ConfigError as error:
                raise ConfigError(f"Arm {arm!r}: {error}") from error
            runs.append(StudyRun(arm, seed, folder, [study.command, *argv, "--resume"]))
    return runs


def _options(settings: dict[str, Setting], studies: Path) -> list[str]:
    """Returns settings as options of a command; `config` comes first, so that the others win."""
    options = []
    for name in sorted(settings, key=lambda name: name != "config"):
        value = settings[name]
        text = json.dumps(value)
        if isinstance(value, str):
            text = value.replace("{studies}", str(studies))
        options += [f"--{name}", text]
    return options
