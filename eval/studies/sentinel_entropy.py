"""How the finished sparse models of a study route sentinels: the paper's Table 14 over seeds.

Comes after `report`; its result has the type of `analysis`, so it is included in the page of all
studies.
"""

import time
from pathlib import Path

from eval.reports.report_files import library_versions
from eval.studies.analysis import StudyResult, arm_numbers, contrast_results
from eval.studies.outcomes import RunOutcome
from eval.studies.report import STUDY_JSON, read_result
from eval.studies.runs import RUNS_FOLDER
from eval.studies.study import Contrast, Measure, Study, Sweep
from moe.commands import inspect_record, inspect_view
from moe.errors import ConfigError, DataError, did_you_mean
from moe.parsing import read_json

NAME = "sentinel_entropy"
"""Name of the study, and of its folder among others."""

_COLUMNS = {"sentinels": "sentinels", "all-tokens": "all_tokens"}
"""The arms, and where the tables of a trace have their entropies."""


def sentinel_result(
    folder: Path, arm: str, corpus: Path, out: Path, *, num_examples: int, command: str
) -> StudyResult:
    """Returns how the finished models of an arm route the sentinels of held-out text.

    Traces and their pages are left in `out`, in a folder for each seed.

    Args:
        folder: Folder of a reported study of pre-training.
        arm: Name of the arm with the sparse models.
        corpus: The text, of which the held-out part is traced.
        out: Folder of the traces.
        num_examples: Examples that are traced.
        command: The command that makes this result.

    Raises:
        ConfigError: When the study has no such arm.
        DataError: When no run of it is complete, or a model has no router.
    """
    source = read_result(folder / STUDY_JSON)
    runs = _runs_of(source, arm, folder)
    outcomes: list[RunOutcome] = []
    for run in runs:
        model = folder / RUNS_FOLDER / arm / f"seed-{run.seed}/model"
        outcomes += _routed(run, model, corpus, out / f"seed-{run.seed}", num_examples)

    # One study of two arms, at every sparse layer.
    layers = list(dict.fromkeys(str(outcome.value) for outcome in outcomes))
    settings = {"model": f"{folder}/{RUNS_FOLDER}/{arm}/seed-{{seed}}/model", "corpus": str(corpus)}
    study = sentinel_study(layers, [run.seed for run in runs])._replace(settings=settings)
    numbers = arm_numbers(study, outcomes)
    return StudyResult(
        study=study,
        command=command,
        versions=library_versions(),
        overrides=source.overrides,
        outcomes=outcomes,
        missing=[name for name in source.missing if name.startswith(f"{arm}, ")],
        sizes={},
        numbers=numbers,
        contrasts=contrast_results(study, numbers),
        crossing=None,
    )


def _runs_of(source: StudyResult, arm: str, folder: Path) -> list[RunOutcome]:
    """Returns the runs of an arm that ended with a model."""
    if arm not in source.study.arms:
        known = ", ".join(source.study.arms)
        closest = did_you_mean(arm, source.study.arms)
        raise ConfigError(f"--arm is {arm!r}; there is no such arm.{closest} Known: {known}.")
    if source.study.sweep is not None:
        raise ConfigError(f"{folder} has several models of a seed: give a study without a sweep.")

    runs = [run for run in source.outcomes if run.arm == arm and not run.has_diverged]
    if not runs:
        raise DataError(f"No run of arm {arm!r} is complete in {folder}. Run the study first.")
    return runs


def _routed(
    run: RunOutcome, model: Path, corpus: Path, out: Path, num_examples: int
) -> list[RunOutcome]:
    """Returns the entropies of one model, of sentinels and of all tokens, in each layer."""
    # Wall-clock and CPU seconds.
    started = time.perf_counter()
    cpu_started = time.process_time()

    # With the public commands for one model.
    trace = str(out / "trace")
    tables = out / "tables.json"
    argv = ["--model", str(model), "--corpus", str(corpus), "--examples", str(num_examples)]
    inspect_record.main([*argv, "--out", trace])
    argv = ["--trace", trace, "--out", str(out / "view.html"), "--json", str(tables)]
    inspect_view.main(argv)

    # The time for tracing is divided among the numbers.
    layers = read_json(tables)["sentinels"]
    share = 1 / (2 * len(layers))
    measured = run._replace(
        initial=None,
        curve=[],
        routers={},
        seconds=share * (time.perf_counter() - started),
        cpu_seconds=share * (time.process_time() - cpu_started),
    )
    outcomes = []
    for layer in layers:
        for arm, column in _COLUMNS.items():
            entropy = layer[column]["value"]
            outcomes.append(measured._replace(arm=arm, value=layer["layer"], number=entropy))
    return outcomes


def sentinel_study(layers: list[str], seeds: list[int]) -> Study:
    """Returns a study that compares sentinels with other tokens in each layer.

    Args:
        layers: Names of their sparse layers, e.g. `encoder 1`; at the first one is the declared
            comparison.
        seeds: Seeds of the models.
    """
    sentinels, others = _COLUMNS
    primary = Contrast(sentinels, others, margin=0.1, at=layers[0])
    contrasts = []
    for layer in layers:
        if layer.startswith("decoder"):
            contrasts.append(primary._replace(expect="equal", at=layer))
    return Study(
        title="Entropy of sentinels",
        claim="The encoder routes sentinels to few experts.",
        paper=(
            "ST-MoE (arXiv:2202.08906) table 14: 2.2, 1.8, 1.6, 1.7, 1.7 and 1.2 nats in the sparse layers of the "
            "encoder, 3.4 in each of the decoder; even over 32 experts is 3.5."
        ),
        expected="Low in the encoder, nearly even in the decoder; even over 8 experts is 2.08.",
        command="pretrain",
        settings={},
        arms={arm: {} for arm in _COLUMNS},
        seeds=seeds,
        measure=Measure("entropy of first choices", unit="nats"),
        primary=primary,
        contrasts=contrasts,
        sweep=Sweep("sparse layer", [*layers]),
        cost="a minute for each model",
        order=15,
    )
