"""The end of the demo and the beginning of its report: the training and its results.

Reads the files of the steps; only the tokens of the experts are traced again.
"""

from pathlib import Path

import torch

from eval.commands.compare import compare_runs
from eval.reports.records import Comparison
from eval.studies.report import STUDY_JSON, read_result
from moe.commands.routing_inputs import load_inspected
from moe.data.corpus import load_corpus
from moe.data.pair_files import read_pairs
from moe.data.pipeline import SpanCorruptionSource
from moe.data.tokenizer import SpecialIds
from moe.data.tokens import tokenize_corpus
from moe.inspection.formatting import format_interval, format_score
from moe.inspection.page.report_inputs import (
    Bar,
    BarPanel,
    Evaluation,
    Score,
    Summary,
    SystemScores,
    read_evaluation,
    read_stages,
)
from moe.inspection.page.report_text import ngram_losses
from moe.inspection.tables import LayerCounts, count_tokens, preferred_tokens, token_names
from moe.models.configuration import STMoEConfig
from moe.tracing.examples import pretraining_noise
from moe.tracing.recorder import record_routing, traced_batches
from moe.tracing.trace import layer_name
from moe.training.heldout_loss import TEXT_LOSS, is_text, loss_sentence

_LISTED_TOKENS = 8


def summarize(out: Path, *, labels: int | None) -> tuple[list[str], Summary]:
    """Returns at most 11 lines, and the same as the beginning of the report.

    Args:
        out: Folder of a demo whose models are trained and evaluated.
        labels: Number of labels that the models were fine-tuned on; None for all.
    """
    model = out / "pretrain/model"
    evaluation = read_evaluation(out / "eval/report.json")
    sides = [f"{name}={out / 'eval'}" for name in evaluation.models]
    comparison = compare_runs(*sides, mode="generate")
    (pretraining,) = read_stages([f"pretrain={out / 'pretrain/metrics.jsonl'}"])
    recall, facts = facts_recalled(out)

    # Facts, pre-training or not, loss, experts.
    losses = []
    held_out = pretraining.last(TEXT_LOSS)
    if held_out is not None:
        losses.append(loss_sentence(held_out[TEXT_LOSS], ngram_losses(held_out)))
    task = task_lines(evaluation, comparison, labels)
    experts = expert_lines(model, out / "corpus")
    trained = trained_sentence(STMoEConfig.from_pretrained(model))
    lines = [trained, *losses, *task, *experts, facts]

    about, scores, gain, baselines = map(str.strip, task)
    tested = f"{about} {scores}. {gain} {baselines[0].upper()}{baselines[1:]}."
    sentences = [facts, tested, *losses, " ".join(experts)]
    return lines, Summary(sentences=sentences, panels=[recall])


def trained_sentence(config: STMoEConfig) -> str:
    """Returns a description of the pre-training."""
    return (
        f"Trained: a sparse encoder-decoder of {config.num_parameters():,} parameters, of which "
        f"{config.num_active_parameters():,} are used by each token."
    )


def task_lines(evaluation: Evaluation, comparison: Comparison, labels: int | None) -> list[str]:
    """Returns the scores of both models, their difference, and the baselines."""
    task = evaluation.tasks[0]
    models = [system for system in task.systems if system.mode == "generate"]
    baselines = [system for system in task.systems if system.mode == "baseline"]
    budget = "all labels" if labels is None else f"{labels:,} labels"
    lines = [
        f"{task.task}, {budget}, {task.num_examples:,} {task.split} examples, "
        f"{_headline(models[0]).metric} in % (95 % interval):"
    ]

    compared = comparison.tasks[0].metrics[0]
    scores = ", ".join(_with_interval(system) for system in models)
    verdict = "not resolved"
    if compared.low is not None and compared.high is not None and compared.low * compared.high > 0:
        verdict = "resolved"
    p = "" if compared.p_value is None else f", p = {compared.p_value:.2g}"
    lines.append(f"  {scores}")
    lines.append(
        f"  Pre-training gains {format_score(compared.difference, sign=True)} points "
        f"({format_interval(compared.low, compared.high)}{p}): {verdict}."
    )
    listed = ", ".join(f"{system.name} {_value(system)}" for system in baselines)
    return [*lines, f"  baselines: {listed}"]


def _headline(system: SystemScores) -> Score:
    return system.scores[0]


def _value(system: SystemScores) -> str:
    return format_score(_headline(system).value)


def _with_interval(system: SystemScores) -> str:
    score = _headline(system)
    return f"{system.name} {_value(system)} ({format_interval(score.low, score.high)})"


def expert_lines(model_folder: Path, corpus_folder: Path) -> list[str]:
    """Returns a line for the most specialized expert of each stack: the text tokens it prefers."""
    _, model, tokenizer = load_inspected(model_folder)
    ids = SpecialIds.of(tokenizer)
    source = SpanCorruptionSource(
        tokenize_corpus(load_corpus(corpus_folder).held_out, tokenizer),
        ids,
        inputs_length=64,
        batch_size=64,
        seed=0,
        noise=pretraining_noise(model.config, None),
    )
    trace = record_routing(model, traced_batches(map(source.batch, range(4))))

    lines = []
    layers = {layer.key[0]: layer for layer in count_tokens(trace, model.config.vocab_size)}
    for layer in layers.values():
        expert, tokens, share = most_specialized(layer, ids)
        names = " ".join(token_names(tokenizer, layer, tokens)).replace("▁", "_")
        lines.append(
            f"Expert {expert} of {layer_name(layer.key)} prefers {names}: "
            f"{100 * share:.0f} % of its text tokens."
        )
    return lines


def facts_recalled(out: Path) -> tuple[BarPanel, str]:
    """Returns what the sparse and the dense model recall of the facts they were trained on."""
    result = read_result(out / "knowledge" / STUDY_JSON)
    num_facts = len(read_pairs(out / "facts/facts.jsonl"))
    recall = {run.arm: run.number for run in result.outcomes}
    experts = f"{result.study.arms['experts']['model.num_experts']} experts"
    sentence = (
        f"Recalled of {num_facts:,} random facts at equal cost per token: {experts} "
        f"{format_score(recall['experts'])} %, dense {format_score(recall['dense'])} %."
    )
    bars = [Bar(name=experts, value=recall["experts"]), Bar(name="dense", value=recall["dense"])]
    return BarPanel(title=f"{num_facts:,} random facts recalled", bars=bars), sentence


def most_specialized(layer: LayerCounts, ids: SpecialIds) -> tuple[int, list[int], float]:
    """Returns the expert whose preferred text tokens make up most of its text, these, and their share.

    Experts are numbered from 1, as on the pages.
    """
    counts = layer.first_choice  # [V, E]
    text = counts * is_text(torch.arange(len(counts)), ids)[:, None]  # [V, E]
    best: tuple[int, list[int], float] = (1, [], -1.0)
    for expert in range(text.shape[1]):
        preferred = preferred_tokens(text, expert, number=_LISTED_TOKENS)
        received = sum(token.occurrences for token in preferred)
        share = received / max(1, int(text[:, expert].sum()))
        if share > best[2]:
            best = (expert + 1, [token.token for token in preferred], share)
    return best
