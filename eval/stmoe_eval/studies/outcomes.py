"""Outcomes of the runs of a study: the measured number, the curve and the cost of each.

Comes after `scheduler`, before `analysis`, which compares the arms.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from moe.commands.plan import read_workload
from moe.errors import DataError
from moe.models.configuration import STMoEConfig
from moe.parsing import read_json, read_json_lines
from moe.training.metrics import METRICS_FILE
from moe.training.recipe import PretrainRecipe
from stmoe_eval.reports.run_folder import REPORT
from stmoe_eval.studies.runs import EVALUATION_FOLDER, StudyRun
from stmoe_eval.studies.scheduler import read_state
from stmoe_eval.studies.study import Evaluation, Measure, Study


class Point(NamedTuple):
    """One value of a curve.

    Attributes:
        step: Number of updates of the model.
        value: The metric; None when it was not finite.
    """

    step: int
    value: float | None


class RunOutcome(NamedTuple):
    """One complete run.

    Attributes:
        arm: Name of the arm.
        seed: Seed of the run.
        number: The measured number. A diverged run counts with its number before the first update.
        has_diverged: Whether training ended because loss or gradient was not finite.
        curve: The metric of the curves during training.
        steps: Updates of the run.
        tokens: Tokens of the encoder and the decoder that it trained on; None for fine-tuning.
        seconds: Duration of the run, including other load on the machine.
        cpu_seconds: Seconds of the processor.
        routers: Last value of each router metric.
    """

    arm: str
    seed: int
    number: float
    has_diverged: bool
    curve: list[Point]
    steps: Annotated[int, Field(ge=1)]
    tokens: int | None
    seconds: float
    cpu_seconds: float
    routers: dict[str, float]


class ArmSize(NamedTuple):
    """Parameters of the models of an arm.

    Attributes:
        parameters: All of them.
        active: Parameters that one token uses: the paper's measure of equal FLOPs.
    """

    parameters: int
    active: int


def read_outcome(study: Study, run: StudyRun) -> RunOutcome:
    """Returns the outcome of a complete run.

    Raises:
        DataError: When its files do not hold the metric of the study.
    """
    state = read_state(run)
    assert state is not None and state.is_complete, f"{run.name} is not complete"
    path = run.folder / METRICS_FILE
    lines = [line for _, line in read_json_lines(path, torn_end=True, nan=True)]
    measure = study.measure
    curve = _curve(lines, measure.curve or measure.metric)

    # A diverged run counts like its model before the first update.
    initial = None
    if study.evaluate is None:
        values = _values(lines, measure.metric)
        if not values:
            raise DataError(f"{path} holds no {measure.metric!r}. Choose another measure.metric.")
        initial = values[0] if lines[0]["step"] == 0 else None

    # The measured number: from the evaluation if there is one, else from training.
    if state.has_diverged:
        number = 0.0 if initial is None else initial
    elif study.evaluate is not None:
        number = _score(run, study.evaluate, measure.metric)
    else:
        number = _summary(_values(lines, measure.metric), measure)

    # Tokens as the planner counts them, sentinels and end tokens included.
    tokens = None
    if isinstance(run.recipe, PretrainRecipe):
        workload = read_workload(run.recipe)
        tokens = workload.batch_size * sum(workload.lengths) * run.recipe.training.steps or None

    # The last value of each router metric.
    routers: dict[str, float] = {}
    for line in lines:
        routers.update({name: line[name] for name in line if name.startswith("router/")})

    return RunOutcome(
        arm=run.arm,
        seed=run.seed,
        number=number,
        has_diverged=state.has_diverged,
        curve=curve,
        steps=run.recipe.training.steps,
        tokens=tokens,
        seconds=state.seconds,
        cpu_seconds=state.cpu_seconds,
        routers=routers,
    )


def arm_size(run: StudyRun) -> ArmSize | None:
    """Returns the size of the models of an arm; None if no run has kept its model."""
    # A run that starts from a model has its architecture, whatever the recipe says.
    folder = run.folder / "model"
    if folder.exists():
        config = STMoEConfig.from_pretrained(folder)
    elif isinstance(run.recipe, PretrainRecipe):
        config = run.recipe.build_config()
    else:
        return None
    return ArmSize(config.num_parameters(), config.num_active_parameters())


def _curve(lines: Sequence[dict[str, Any]], metric: str) -> list[Point]:
    """Returns the values of a metric over a run."""
    points = []
    for line in lines:
        if metric in line:
            value = line[metric]
            points.append(Point(int(line["step"]), value if math.isfinite(value) else None))
    return points


def _values(lines: Sequence[dict[str, Any]], metric: str) -> list[float]:
    return [line[metric] for line in lines if metric in line]


def _summary(values: Sequence[float], measure: Measure) -> float:
    """Returns the one number of a run."""
    if measure.at == "best":
        return min(values) if measure.better == "lower" else max(values)
    return values[-1]


def _score(run: StudyRun, evaluate: Evaluation, metric: str) -> float:
    """Returns a metric of the evaluation of a run.

    Raises:
        DataError: When the report does not hold it.
    """
    path = run.folder / EVALUATION_FOLDER / REPORT
    report = read_json(path, advice=f"Remove {run.folder / EVALUATION_FOLDER} and run again.")

    # The only model in the only task; baselines have their own mode.
    for task in report["tasks"]:
        for system in task["systems"]:
            for score in system["scores"]:
                is_asked = (system["mode"], score["metric"]) == (evaluate.mode, metric)
                if is_asked and score["value"] is not None:
                    return float(score["value"])
    raise DataError(f"{path} holds no {metric!r} in mode {evaluate.mode}. Choose another metric.")
