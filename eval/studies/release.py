"""Exports the best sparse model of a study and its dense counterpart as folders with model cards.

Comes after `report`, whose study.json the numbers of the cards are read from.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eval.reports.formatting import markdown_table
from eval.studies.analysis import StudyResult
from eval.studies.charts import contrast_name
from eval.studies.outcomes import RunOutcome
from eval.studies.report import interval_text, seeds_text
from eval.studies.runs import StudyRun
from moe.commands.pretrain import build_source, describe_amount
from moe.data.corpus import corpus_table, load_corpus
from moe.data.tokenizer import SpecialIds, load_tokenizer
from moe.data.tokens import tokenize_corpus
from moe.errors import DataError
from moe.files import whole_folder
from moe.models.card import model_card, write_card
from moe.models.configuration import STMoEConfig
from moe.parsing import read_text
from moe.training.loop import RECIPE_FILE
from moe.training.recipe import PretrainRecipe

_ARM_HEADER = ("model", "each seed", "this one")


class Pair(NamedTuple):
    """The runs of the two arms of a study's primary comparison, with one seed.

    Attributes:
        best: Run of the first arm.
        rival: Run of the other arm, with the same batches in the same order.
    """

    best: StudyRun
    rival: StudyRun


def primary_runs(result: StudyResult, runs: Sequence[StudyRun]) -> list[Pair]:
    """Returns the runs of the primary comparison of which both are complete, the best first.

    Args:
        result: Result of a study without a sweep.
        runs: All runs of the study.
    """
    # Diverged runs have no model, and those of another study have none here.
    contrast = result.study.primary
    outcomes: dict[tuple[str, int], RunOutcome] = {}
    for outcome in result.outcomes:
        if not outcome.has_diverged and not outcome.taken_from:
            outcomes[outcome.arm, outcome.seed] = outcome
    by_arm_seed = {(run.arm, run.seed): run for run in runs}

    pairs = []
    for seed in result.study.seeds:
        best = (contrast.arm, seed)
        rival = (contrast.against, seed)
        if best in outcomes and rival in outcomes:
            pairs.append(Pair(by_arm_seed[best], by_arm_seed[rival]))

    # Ties go to the first seed.
    sign = 1 if result.study.measure.better == "lower" else -1
    return sorted(pairs, key=lambda pair: sign * outcomes[contrast.arm, pair.best.seed].number)


def release_model(run: StudyRun, result: StudyResult, corpus: Path, target: Path) -> None:
    """Makes a folder with a run's model and tokenizer, and a model card.

    An earlier folder is replaced.

    Args:
        run: A complete run of pre-training.
        result: The study's result.
        corpus: The text that it trained on.
        target: The folder to make.

    Raises:
        DataError: When the model is missing, or the folder holds something else.
    """
    source = run.folder / "model"
    if not source.is_dir():
        raise DataError(f"{run.name} has no model in {source}. Remove {run.folder} and run again.")

    # The weights as they were trained, bit for bit; only the card differs.
    sections = {
        "Training": _training(run, result, corpus),
        "Text": _text(corpus),
        "Results": _results(run, result),
        "Recipe": _recipe(run),
    }
    config = STMoEConfig.from_pretrained(source)
    with whole_folder(target, kind="model") as partial:
        shutil.copytree(source, partial, dirs_exist_ok=True)
        write_card(partial, model_card(config, sections=sections))


def _training(run: StudyRun, result: StudyResult, corpus: Path) -> str:
    """Returns the amount of training text, and the cost."""
    assert isinstance(run.recipe, PretrainRecipe), "models are released of pre-training"
    tokenizer = load_tokenizer(run.folder / "model")
    tokens = tokenize_corpus(load_corpus(corpus).train, tokenizer)
    source = build_source(run.recipe, tokens, SpecialIds.of(tokenizer))
    amount = describe_amount(source, run.recipe.training.steps)

    outcome = _outcome_of(run, result)
    return (
        f"Span corruption. {amount} {outcome.cpu_seconds / 60:.0f} minutes of one processor core; "
        f"seed {run.seed}, one of {len(result.study.seeds)}."
    )


def _text(corpus: Path) -> str:
    """Returns a description of the text, with its licences."""
    sentence = "Cleaned and de-duplicated; each part of it keeps its licence:"
    return f"{sentence}\n\n{corpus_table(load_corpus(corpus))}"


def _results(run: StudyRun, result: StudyResult) -> str:
    """Returns the numbers of all models that it was compared with, and the conclusions."""
    study = result.study
    unit = f" ({study.measure.unit})" if study.measure.unit else ""
    rows = []
    for arm in study.arms:
        numbers = [number for number in result.numbers if number.arm == arm]
        texts = [f"{number.number:.4f}" for number in numbers]
        chosen = [f"{number.number:.4f}" for number in numbers if number.seed == run.seed]
        rows.append([arm, ", ".join(texts), chosen[0] if arm == run.arm and chosen else ""])
    lines = [f"`{study.measure.metric}`{unit} of the same held-out text:", ""]
    lines += [*markdown_table(_ARM_HEADER, rows), ""]

    # The declared comparison, over all seeds.
    item = result.contrasts[0]
    interval = f" (95 % interval {interval_text(item)})" if item.low is not None else ""
    lines.append(
        f"{study.claim} *{item.verdict_text}*: {contrast_name(item)} is better by {item.difference:+.4f}"
        f"{interval}, {seeds_text(item.num_seeds)}. Released are the best seed of "
        f"{study.primary.arm}, and {study.primary.against} with the same seed. Made by "
        f"`{result.command}`."
    )
    if result.missing:
        lines.append(f"Not run: {'; '.join(result.missing)}.")
    return "\n".join(lines)


def _recipe(run: StudyRun) -> str:
    text = read_text(run.folder / RECIPE_FILE).rstrip()
    return f"```yaml\n{text}\n```"


def _outcome_of(run: StudyRun, result: StudyResult) -> RunOutcome:
    """Returns the results of a run."""
    for outcome in result.outcomes:
        if (outcome.arm, outcome.seed) == (run.arm, run.seed):
            return outcome
    raise DataError(f"The result of the study has no {run.name}. Make it again with --report.")
