"""report.html: one page that explains what the routers of a model did on a text.

A section whose numbers were not given is not there.
"""

import math
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from moe.data.tokenizer import SpecialIds
from moe.files import write_text
from moe.inspection.formatting import format_interval, format_score, format_versions
from moe.inspection.html_page import render_page
from moe.inspection.report import plots, report_text
from moe.inspection.report.report_data import ReadEvaluation, Stage, TracedModel, TracedText
from moe.inspection.report.report_view import (
    Card,
    EvaluationView,
    ExpertView,
    LayerView,
    RouterReportView,
    RunView,
    SourceView,
    TaskView,
    TokenView,
)
from moe.inspection.tables import (
    HEALTH_HEADER,
    MIN_OCCURRENCES,
    TokenCount,
    health_rows,
    load_shares,
    preferred_tokens,
    routing_entropy,
    token_names,
    top_tokens,
)
from moe.inspection.token_counts import LayerCounts, RoutingCounts
from moe.models.configuration import STMoEConfig
from moe.parsing import printable, read_text
from moe.sparse.stats import summarize
from moe.tracing.trace import layer_name

GENERATOR = "stmoe inspect_router"
"""By which a page of this library is told from other HTML files."""

# Tokens of an expert that are listed; fewer when the page would be too long to be read.
_LISTED_TOKENS = 12
_FEW_TOKENS = 4
_MANY_EXPERTS = 200


def write_report(
    path: Path,
    *,
    config: STMoEConfig,
    tokenizer: PreTrainedTokenizerFast,
    counts: RoutingCounts,
    model: TracedModel,
    text: TracedText,
    command: str,
    stages: Sequence[Stage] = (),
    evaluation: ReadEvaluation | None = None,
) -> None:
    """Writes the page, whole or not at all.

    Args:
        path: The .html file.
        config: Config of the traced model, which has a sparse layer.
        tokenizer: Names the tokens.
        counts: Counts of the tokens of held-out batches.
        model: Which model was traced.
        text: What it read.
        command: The command that makes this page.
        stages: Metrics of runs; may be empty.
        evaluation: Evaluation of the same or of other models; None for no section about one.
    """
    layer_names = [layer_name(layer.key) for layer in counts]
    shares = list(map(load_shares, counts))
    view = RouterReportView(
        sizes=report_text.size_sentence(config),
        cards=_cards(counts, model, stages, evaluation),
        source=_source(model, text, command),
        load_map=plots.plot_load(layer_names, shares),
        health_header=HEALTH_HEADER,
        health_rows=health_rows(counts),
        load_sentences=_load_sentences(config, counts),
        sentinel_rows=[_sentinel_row(tokenizer, layer) for layer in counts],
        layers=_layers(tokenizer, counts),
        min_occurrences=MIN_OCCURRENCES,
        runs=[_run(config, model, stage) for stage in stages],
        accuracy_curves=_accuracy_curves(stages),
        evaluation=None if evaluation is None else _evaluation(model, evaluation),
        corpus_table=text.table,
    )

    title = f"What the routers of {printable(model.folder)} do"
    page = render_page("router_report.html", title=title, generator=GENERATOR, view=view)
    write_text(path, page)


def library_versions() -> dict[str, str]:
    """Returns the versions of Python, of this library and of what it computes with."""
    versions = {"python": platform.python_version()}
    for name in ("stmoe", "torch", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # run from a source tree that is not installed
            versions[name] = "not installed, run from its source"
    return versions


# ---------------------------------------------------------------------------
# What was traced


def _cards(
    counts: RoutingCounts,
    model: TracedModel,
    stages: Sequence[Stage],
    evaluation: ReadEvaluation | None,
) -> list[Card]:
    """Returns the most important numbers of routers, training and evaluation."""
    # Routers: of all layers together, and of the worst.
    summaries = [summarize(layer.stats) for layer in counts]
    num_dead = sum(summary["dead_experts"] for summary in summaries)
    most_dropped = max(summary["fraction_dropped"] for summary in summaries)
    num_experts = _num_experts(counts)
    cards = [
        Card(
            f"{num_dead:.0f} of {num_experts}",
            "experts of all sparse layers are dead: no token asks for them",
        ),
        Card(
            f"{100 * most_dropped:.2f} %",
            "of the tokens reach no expert, in the layer where most are dropped",
        ),
    ]

    # The held-out loss of the run that made the model.
    for stage in stages:
        line = stage.last("heldout/text_loss")
        if line is None or not stage.made(model.folder):
            continue
        loss = line["heldout/text_loss"]
        if math.isfinite(loss):
            sentence = f"for a held-out text token. {report_text.loss_sentence(line)}"
            cards.append(Card(f"{loss:.2f} nats", sentence))

    # The first score of each task.
    for task in evaluation.content.tasks if evaluation else []:
        for system in task.systems[:1]:
            score = system.scores[0]
            interval = format_interval(score.low, score.high)
            cards.append(
                Card(
                    format_score(score.value),
                    f"{score.metric} of {system.name} on {task.task}, by {system.mode} ({interval})",
                )
            )
    return cards


def _source(model: TracedModel, text: TracedText, command: str) -> SourceView:
    """Returns from what the page was made, and by what."""
    return SourceView(
        model=printable(model.folder),
        fingerprint=model.fingerprint,
        recipe=None if model.recipe is None else printable(model.recipe),
        recipe_text="" if model.recipe is None else read_text(model.recipe),
        corpus=printable(text.corpus),
        text=f"{text.num_documents:,} documents, {text.num_tokens:,} tokens",
        batches=report_text.batches_sentence(text),
        masks=text.masks,
        loss=text.loss,
        made_with=f"{format_versions(library_versions())}; {model.device}",
        command=printable(command),
    )


def _num_experts(counts: RoutingCounts) -> int:
    """Returns the number of experts of all layers."""
    return sum(layer.first_choice.shape[1] for layer in counts)


# ---------------------------------------------------------------------------
# What the routers did


def _load_sentences(config: STMoEConfig, counts: RoutingCounts) -> list[str]:
    sentences = list(map(report_text.layer_sentence, counts))
    if config.eval_capacity_field is None:
        sentences.append("There is no capacity in evaluation, so no token can be dropped.")
    return sentences


def _sentinel_row(tokenizer: PreTrainedTokenizerFast, layer: LayerCounts) -> list[str]:
    """Returns over how many experts sentinels spread, beside text."""
    # Sentinels have the highest ids; text is below them, without the special tokens.
    counts = layer.first_choice  # [V, E]
    ids = SpecialIds.of(tokenizer)
    lowest_sentinel = ids.first_sentinel - ids.num_sentinels + 1
    token = torch.arange(len(counts), device=counts.device)  # [V]
    is_sentinel = (token >= lowest_sentinel) & (token <= ids.first_sentinel)
    is_text = (token < lowest_sentinel) & (token != ids.eos) & (token != ids.pad)

    row = [layer_name(layer.key)]
    for tokens in (is_sentinel, is_text):
        row += _expert_spread(counts, tokens)
    row.append(f"{plots.even_entropy(counts.shape[1]):.2f}")
    return row


def _expert_spread(counts: Tensor, tokens: Tensor) -> list[str]:
    """Returns how often a class of tokens was seen, the entropy of its experts, and as how many
    equally used experts that is.

    Args:
        counts: <int64>[V, E] first choices.
        tokens: <bool>[V] the class.
    """
    num_seen = int(counts[tokens].sum())
    if not num_seen:
        return ["0", "-", "-"]
    entropy = routing_entropy(counts, tokens)
    return [f"{num_seen:,}", f"{entropy:.2f}", f"{math.exp(entropy):.1f}"]


def _layers(tokenizer: PreTrainedTokenizerFast, counts: RoutingCounts) -> list[LayerView]:
    """Returns for each expert of each layer the tokens that it receives and prefers."""
    # Fewer tokens for each of many experts, so that the page can be read.
    number = _LISTED_TOKENS if _num_experts(counts) <= _MANY_EXPERTS else _FEW_TOKENS

    layers = []
    for layer in counts:
        first_choice = layer.first_choice  # [V, E]
        num_tokens = int(first_choice.sum())
        experts = []
        for expert in range(first_choice.shape[1]):
            # Its share of all first choices, and the tokens behind it.
            num_chosen = int(first_choice[:, expert].sum())
            received = top_tokens(first_choice, expert, number=number)
            preferred = preferred_tokens(first_choice, expert, number=number)
            experts.append(
                ExpertView(
                    number=expert + 1,
                    share=f"{100 * num_chosen / max(1, num_tokens):.1f} %",
                    received=_tokens(tokenizer, layer, received, with_lift=False),
                    preferred=_tokens(tokenizer, layer, preferred, with_lift=True),
                )
            )
        layers.append(LayerView(f"{layer_name(layer.key)}: {num_tokens:,} tokens", experts))
    return layers


def _tokens(
    tokenizer: PreTrainedTokenizerFast,
    layer: LayerCounts,
    counts: Sequence[TokenCount],
    *,
    with_lift: bool,
) -> list[TokenView]:
    """Returns tokens with their counts, and with their lift if wanted."""
    names = token_names(tokenizer, layer, [count.token for count in counts])
    tokens = []
    for name, count in zip(names, counts, strict=True):
        lift = f" · {count.lift:.1f} x" if with_lift else ""
        tokens.append(
            TokenView(
                name=name,
                counts=f"{count.occurrences:,}/{count.seen:,}{lift}",
                tooltip=(
                    f"{count.occurrences:,} of its {count.seen:,} occurrences; lift {count.lift:.2f}"
                ),
                percent=round(100 * count.occurrences / count.seen),
            )
        )
    return tokens


# ---------------------------------------------------------------------------
# How it was trained, and how well it answers


def _run(config: STMoEConfig, model: TracedModel, stage: Stage) -> RunView:
    """Returns the curves of a run, and what its last lines say."""
    # The traced model tells how many experts there are; another run may have others.
    made_model = stage.made(model.folder)
    curves = None
    if plots.has_curves(stage.lines):
        num_experts = config.num_experts if made_model else None
        curves = plots.plot_training(stage.lines, num_experts)
    return RunView(
        title=f"{stage.name}: the run of the traced model" if made_model else stage.name,
        path=printable(stage.path),
        sentences=report_text.run_sentences(stage),
        curves=curves,
    )


def _accuracy_curves(stages: Sequence[Stage]) -> str | None:
    """Returns the accuracies of all runs in one figure; None for fewer than two."""
    with_accuracy = [stage for stage in stages if stage.last("heldout/token_accuracy")]
    if len(with_accuracy) < 2:
        return None
    return plots.plot_accuracy(with_accuracy)


def _evaluation(model: TracedModel, evaluation: ReadEvaluation) -> EvaluationView:
    """Returns the scores of all systems, and how their intervals lie."""
    tasks = []
    for task in evaluation.content.tasks:
        rows = []
        for system in task.systems:
            for score in system.scores:
                value = format_score(score.value)
                interval = format_interval(score.low, score.high)
                rows.append([system.name, system.mode, score.metric, value, interval])
        tasks.append(
            TaskView(
                name=task.task,
                description=(
                    f"{task.description} {task.num_examples:,} examples of the {task.split} split in "
                    f"{task.num_groups:,} groups."
                ),
                rows=rows,
                comparisons=report_text.system_comparisons(task),
            )
        )

    failed = evaluation.content.failed
    return EvaluationView(
        path=printable(evaluation.path),
        models=report_text.model_sentences(model, evaluation.content),
        tasks=tasks,
        failures=[f"{failure.task} failed: {failure.message}" for failure in failed],
    )
