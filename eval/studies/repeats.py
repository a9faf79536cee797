"""Repeats runs and checks that the results are bit-identical.

Comes after `scheduler`, before `analysis`, whose result reports it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from eval.studies.outcomes import read_taken
from eval.studies.runs import StudyRun, parse_arm_and_seed, study_runs
from eval.studies.scheduler import Budget, RunState, read_state, run_all
from eval.studies.study import SettingValue, Study
from moe.errors import ConfigError
from moe.models.weight_files import weight_files
from moe.parsing import read_json_lines
from moe.training.metrics import METRICS_FILE

REPEATS_FOLDER = "repeats"

_OF_TIME = frozenset({"train/tokens_per_second", "train/data_wait_seconds"})


class Repeat(NamedTuple):
    """A run that was made again from its beginning.

    Attributes:
        arm: Name of the arm.
        value: Value of the sweep; None without one.
        seed: Seed of the run.
        threads: Threads of the second run; those of the first run, if recorded.
        num_values: Numbers that both runs have logged: all metrics but the speed.
        first_difference: First step at which a number differs or is missing; None for none.
        has_equal_weights: Whether the final weights are equal; None where there are none.
    """

    arm: str
    value: SettingValue
    seed: int
    threads: int
    num_values: int
    first_difference: int | None
    has_equal_weights: bool | None

    @property
    def is_identical(self) -> bool:
        """Whether nothing differs."""
        return self.first_difference is None and self.has_equal_weights is not False


def repeat_runs(
    study: Study,
    out: Path,
    overrides: Mapping[str, SettingValue],
    arm_and_seed: str,
    budget: Budget,
) -> None:
    """Makes the runs of an arm with one seed a second time, at every value of a sweep.

    Args:
        study: The study.
        out: Its folder, in which these runs are complete.
        overrides: Settings of the command line.
        arm_and_seed: ARM:SEED, or ARM for the first seed.
        budget: Runs at a time, and hours.

    Raises:
        ConfigError: When there is no such arm or seed, or its run is incomplete.
    """
    arm, seed = parse_arm_and_seed(study, arm_and_seed, option="--repeat")
    if seed is None:
        seed = study.seeds[0]
    runs = study_runs(study, out, overrides)
    again = study_runs(study, out, overrides, subfolder=REPEATS_FOLDER)

    # Each waits for the run that it is compared with, and has as many threads.
    chosen: list[StudyRun] = []
    threads = 0
    for first, second in zip(runs, again, strict=True):
        if (first.arm, first.seed) != (arm, seed):
            continue
        state = _complete_state(first)
        if state is None:
            raise ConfigError(
                f"--repeat is {arm_and_seed!r}, but {first.name} is not complete in {out}. Run the "
                "study without --repeat first."
            )
        if read_taken(first) is not None:
            raise ConfigError(
                f"--repeat is {arm_and_seed!r}, but {first.name} was taken from another study, so there is nothing to "
                f"compare with. Remove {first.folder} to run it here."
            )
        threads = state.threads
        chosen.append(second)
    run_all(chosen, budget._replace(threads=threads))


def find_repeats(
    study: Study, out: Path, overrides: Mapping[str, SettingValue], runs: Sequence[StudyRun]
) -> list[Repeat]:
    """Returns the results of the complete repeats in the folder of a study.

    Args:
        study: The study.
        out: Its folder.
        overrides: Settings of the command line.
        runs: Its runs.
    """
    if not (out / REPEATS_FOLDER).exists():
        return []

    # In the order of the runs, each next to its repeat.
    repeats = []
    again = study_runs(study, out, overrides, subfolder=REPEATS_FOLDER)
    for first, second in zip(runs, again, strict=True):
        state = _complete_state(second)
        is_comparable = _complete_state(first) is not None and read_taken(first) is None
        if state is not None and is_comparable:
            repeats.append(_compare(first, second, state.threads))
    return repeats


def repeat_sentence(repeat: Repeat) -> str:
    """Returns whether a repeat gave the same numbers."""
    place = "" if repeat.value is None else f" at {repeat.value}"
    name = f"Repeated: {repeat.arm}{place}, seed {repeat.seed}"
    threads = "1 thread" if repeat.threads == 1 else f"{repeat.threads} threads"
    numbers = f"{repeat.num_values:,} logged numbers"
    if repeat.is_identical:
        weights = "" if repeat.has_equal_weights is None else " and the final weights"
        return f"{name}, with {threads}: all {numbers}{weights} are bit-identical."
    if repeat.first_difference is None:
        return f"{name}, with {threads}: all {numbers} are bit-identical, but the final weights differ."
    return f"{name}, with {threads}: numbers **differ** from step {repeat.first_difference:,}."


def _complete_state(run: StudyRun) -> RunState | None:
    """Returns the state of a run; None when it is not complete."""
    state = read_state(run)
    return state if state is not None and state.is_complete else None


def _compare(first: StudyRun, second: StudyRun, threads: int) -> Repeat:
    """Returns which results two runs of the same settings share."""
    lines = _logged(first)
    again = _logged(second)
    differing = [step for step in lines.keys() | again.keys() if lines.get(step) != again.get(step)]
    return Repeat(
        arm=first.arm,
        value=first.value,
        seed=first.seed,
        threads=threads,
        num_values=sum(map(len, lines.values())),
        first_difference=min(differing, default=None),
        has_equal_weights=_has_equal_weights(first.folder, second.folder),
    )


def _logged(run: StudyRun) -> dict[int, dict[str, str]]:
    """Returns the metrics of a run by step, as texts, in which a NaN equals itself."""
    values_by_step: dict[int, dict[str, str]] = {}
    for _, line in read_json_lines(run.folder / METRICS_FILE, torn_end=True, nan=True):
        values_by_step.setdefault(line["step"], {}).update(_without_time(line))
    return values_by_step


def _without_time(line: Mapping[str, Any]) -> dict[str, str]:
    """Returns the numbers of a line that do not depend on time."""
    names = [name for name in line if name != "step" and name not in _OF_TIME]
    return {name: repr(line[name]) for name in names}


def _has_equal_weights(first: Path, second: Path) -> bool | None:
    """Returns whether the final models of two runs are equal; None where neither has one."""
    weights = _read_weights(first)
    again = _read_weights(second)
    if not weights and not again:
        return None
    if weights.keys() != again.keys():
        return False
    return all(torch.equal(weights[name], again[name]) for name in weights)


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the final weights of a run by name; none if it has no model."""
    weights: dict[str, torch.Tensor] = {}
    for name in weight_files(folder / "model"):
        if name.endswith(".safetensors"):
            weights.update(load_file(folder / "model" / name))
    return weights
