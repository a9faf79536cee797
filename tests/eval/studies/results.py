"""Results of studies that were never run, made of given numbers."""

from stmoe_eval.studies.analysis import StudyResult, contrast_results
from stmoe_eval.studies.outcomes import RunOutcome
from stmoe_eval.studies.study import Contrast, Measure, Study

TOKENS_PER_STEP = 13


def build(**changes: object) -> Study:
    study = Study(
        title="Title",
        claim="Claim.",
        paper="Paper.",
        expected="Expected.",
        command="pretrain",
        settings={},
        arms={"a": {}, "b": {}, "c": {}},
        seeds=[0, 1, 2],
        measure=Measure("heldout/loss"),
        primary=Contrast("a", "b"),
    )
    return study._replace(**changes)


def run(arm: str, seed: int, number: float, **changes: object) -> RunOutcome:
    outcome = RunOutcome(
        arm=arm,
        seed=seed,
        number=number,
        has_diverged=False,
        curve=[],
        steps=100,
        tokens=100 * TOKENS_PER_STEP,
        seconds=7.0,
        cpu_seconds=11.0,
        routers={},
    )
    return outcome._replace(**changes)


def runs_of(numbers: dict[str, list[float]]) -> list[RunOutcome]:
    outcomes = []
    for arm, values in numbers.items():
        outcomes += [run(arm, seed, number) for seed, number in enumerate(values)]
    return outcomes


def result_of(study: Study, outcomes: list[RunOutcome]) -> StudyResult:
    return StudyResult(
        study=study,
        command="python -m scripts.study mine.yaml",
        versions={"torch": "2"},
        overrides={},
        outcomes=outcomes,
        missing=[],
        sizes={},
        contrasts=contrast_results(study, outcomes),
    )
