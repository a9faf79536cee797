"""The runs of a study: the folder and the command of each.

Comes after `study`, before `scheduler`, which starts the commands.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moe.checks import check
from moe.commands.finetune import finetune_command
from moe.commands.pretrain import pretrain_command
from moe.errors import ConfigError, did_you_mean
from moe.parsing import to_json
from moe.training.command import RecipeCommand
from moe.training.recipe import FinetuneRecipe, PretrainRecipe
from stmoe_eval.studies.study import SettingValue, Study

_COMMANDS = {"pretrain": pretrain_command, "finetune": finetune_command}

EVALUATION_FOLDER = "eval"
RUNS_FOLDER = "runs"


@dataclass(frozen=True)
class StudyRun:
    """One run of a study.

    Attributes:
        arm: Name of the arm.
        seed: Seed of the run.
        folder: Folder of the run.
        recipe: The settings as the command reads them.
        commands: Command lines that make the run, one after the other.
        settings: SHA-256 of the settings that make the run. The location of the study's folder is
            ignored, so that the folder can be moved.
    """

    arm: str
    seed: int
    folder: Path
    recipe: PretrainRecipe | FinetuneRecipe
    commands: list[list[str]]
    settings: str

    @property
    def name(self) -> str:
        """Arm and seed, as in messages."""
        return f"{self.arm}, seed {self.seed}"


class _Setup(NamedTuple):
    """Settings that all runs share.

    Attributes:
        study: The study.
        command: Parser of its command lines.
        out: Its folder.
        overrides: Settings that override those of all arms.
    """

    study: Study
    command: RecipeCommand[Any]
    out: Path
    overrides: Mapping[str, SettingValue]


def study_runs(
    study: Study, out: Path, overrides: Mapping[str, SettingValue] | None = None
) -> list[StudyRun]:
    """Returns the runs of a study, those of the first seed first.

    So a study that is stopped early has as many complete seeds as possible.

    Args:
        study: The study.
        out: Its folder.
        overrides: Settings that override those of all arms.

    Raises:
        ConfigError: When a setting is unknown or wrong; names the arm.
    """
    # One parser for all runs, since building it takes longer than using it.
    setup = _Setup(study, _COMMANDS[study.command](), out, overrides or {})
    runs = []
    for seed in study.seeds:
        for arm in study.arms:
            runs.append(_study_run(setup, arm, seed))
    return runs


def chosen_runs(study: Study, runs: Sequence[StudyRun], texts: Sequence[str]) -> list[StudyRun]:
    """Returns the runs that ARM or ARM:SEED name; all, for no text.

    Raises:
        ConfigError: When there is no such arm or seed.
    """
    if not texts:
        return list(runs)

    # Without a seed, all of the arm's.
    chosen = set()
    for text in texts:
        arm, seed = _parse_arm_and_seed(study, text)
        for each in study.seeds if seed is None else [seed]:
            chosen.add((arm, each))
    return [run for run in runs if (run.arm, run.seed) in chosen]


def _parse_arm_and_seed(study: Study, text: str) -> tuple[str, int | None]:
    """Returns the arm and the seed of ARM:SEED; no seed for ARM alone."""
    arm, colon, number = text.partition(":")
    if arm not in study.arms:
        known = ", ".join(study.arms)
        closest = did_you_mean(arm, study.arms)
        raise ConfigError(f"--only is {text!r}; there is no such arm.{closest} Known: {known}.")
    if not colon:
        return arm, None

    seeds = {str(seed): seed for seed in study.seeds}
    if number not in seeds:
        raise ConfigError(
            f"--only is {text!r}; expected ARM or ARM:SEED with a seed of {', '.join(seeds)}."
        )
    return arm, seeds[number]


def _study_run(setup: _Setup, arm: str, seed: int) -> StudyRun:
    """Returns one run."""
    study = setup.study
    folder = setup.out / RUNS_FOLDER / arm / f"seed-{seed}"
    settings = {**study.settings, **study.arms[arm], **setup.overrides}

    # Parse the command line once, so that errors are found before any run begins.
    places = {"seed": seed, "out": setup.out, "studies": setup.out.parent}
    argv = list(_options(settings, places))
    argv += ["--seed", str(seed), "--out", str(folder)]
    try:
        recipe, _ = setup.command.parse(argv)
    except ConfigError as error:
        raise ConfigError(f"Arm {arm!r}: {error}") from error

    commands = [[sys.executable, "-m", "stmoe", study.command, *argv, "--resume"]]
    if study.evaluate is not None:
        commands.append(_evaluation_command(study, folder))

    # The name of the arm and the location of its files are ignored.
    making = [study.command, _recipe_content(recipe, settings), _options_content(settings), seed]
    return StudyRun(
        arm=arm,
        seed=seed,
        folder=folder,
        recipe=recipe,
        commands=commands,
        settings=_digest([*making, study.evaluate]),
    )


def _digest(content: list[Any]) -> str:
    return hashlib.sha256(json.dumps(to_json(content), sort_keys=True).encode()).hexdigest()


def _recipe_content(
    recipe: PretrainRecipe | FinetuneRecipe, settings: Mapping[str, SettingValue]
) -> dict[str, Any]:
    """Returns the recipe as read, but with folders as written in the study, e.g. {out}."""
    content = to_json(recipe)
    for name, value in settings.items():
        section, dot, key = name.partition(".")
        if dot and isinstance(value, str) and "{" in value:
            content[section][key] = value
    return content


def _options_content(settings: Mapping[str, SettingValue]) -> dict[str, SettingValue]:
    return {name: settings[name] for name in settings if "." not in name and name != "config"}


def _options(settings: Mapping[str, SettingValue], places: Mapping[str, object]) -> Iterator[str]:
    """Yields settings as options of a command; `config` comes first, so that the others win."""
    for name in sorted(settings, key=lambda name: name != "config"):
        yield f"--{name}"
        yield _as_text(name, settings[name], places)


def _as_text(name: str, value: Any, places: Mapping[str, object]) -> str:
    """Returns a value formatted for a command line."""
    if not isinstance(value, str):
        return json.dumps(value)

    # Names of places are the odd parts.
    known = ", ".join(f"{{{place}}}" for place in places)
    parts = re.split(r"\{(" + "|".join(places) + r")\}", value)
    for part in parts[::2]:
        check(not set(part) & set("{}"), name, value, f"no braces other than {known}")
    parts[1::2] = [str(places[place]) for place in parts[1::2]]
    return "".join(parts)


def _evaluation_command(study: Study, folder: Path) -> list[str]:
    """Returns the command that scores a finished run."""
    assert study.evaluate is not None
    evaluate = study.evaluate
    model = folder / "best/model" if evaluate.model == "best" else folder / "model"
    options = ["--tasks", evaluate.task, "--split", evaluate.split, "--modes", evaluate.mode]
    options += ["--model", f"model={model}", "--out", str(folder / EVALUATION_FOLDER)]
    return [sys.executable, "-m", "stmoe", "eval", "run", *options]
