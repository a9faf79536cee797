"""report.html: which experts serve which kinds of text, the evaluation of a model, and its training.

Panels without data are left out.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerFast

from moe.data.corpus import CORPUS_HEADER
from moe.data.tokenizer import piece_texts
from moe.files import write_text
from moe.inspection.figures import Curve, draw_curves, draw_experts_by_domain, draw_load
from moe.inspection.html_page import render_page
from moe.inspection.page import report_text
from moe.inspection.page.evaluation_panel import Report, model_sentences
from moe.inspection.page.report_inputs import DEV_SCORE, Line, Stage
from moe.inspection.statistics.routing_entropy import (
    SENTINEL_HEADER,
    sentinel_entropies,
    sentinel_rows,
)
from moe.inspection.tables import (
    HEALTH_HEADER,
    MIN_OCCURRENCES,
    TokenCount,
    balance_sentence,
    first_choices,
    health_rows,
    load_shares,
    top_tokens,
)
from moe.models.configuration import STMoEConfig
from moe.parsing import printable
from moe.tracing.trace import LayerTrace, Trace, layer_name

GENERATOR = "stmoe inspect_router"
"""Marks a page of this library among HTML files."""

# Tokens listed for an expert; fewer where the page would be too long to read.
_LISTED_TOKENS = 12
_FEW_TOKENS = 4
_MANY_EXPERTS = 200

_LOSSES = {
    "train/ce_loss": "training, all targets",
    "heldout/loss": "held-out, all targets",
    "heldout/text_loss": "held-out, text tokens",
}


def write_report(
    path: Path,
    *,
    config: STMoEConfig,
    tokenizer: PreTrainedTokenizerFast,
    trace: Trace,
    folder: Path,
    fingerprint: str,
    facts: Sequence[tuple[str, str]],
    recipe_text: str,
    corpus_rows: Sequence[Sequence[str | int]] = (),
    stages: Sequence[Stage] = (),
    evaluations: Mapping[str, Report] | None = None,
) -> None:
    """Writes the page, whole or not at all.

    Args:
        path: The .html file.
        config: Config of the traced model, which has a sparse layer.
        tokenizer: Names the tokens.
        trace: Its routing of held-out examples.
        folder: Folder of the model.
        fingerprint: Identifies the model's files; an evaluation records the same one.
        facts: Names and texts about the trace; `names` in backquotes are set as code.
        recipe_text: The recipe of the model's run; empty where none is known.
        corpus_rows: Documents, characters and licences of the corpus, under CORPUS_HEADER.
        stages: Metrics of runs; may be empty.
        evaluations: Evaluations of the same or of other models by their titles; see `read_evaluation`.
    """
    reports = evaluations or {}
    experts = None
    expert_sentences = []
    if len(trace.facts.domains) > 1:
        tables, groups = report_text.tables_by_domain(trace)
        shares = report_text.expert_shares(tables[-1]).tolist()
        experts = draw_experts_by_domain(shares, tables[-1].names, groups)
        expert_sentences = report_text.domain_sentences(tables)
    sentinels = sentinel_rows(sentinel_entropies(trace, tokenizer)) if corpus_rows else []
    panels = ["experts"] if experts else []
    panels += ["evaluation"] if evaluations else []
    panels += ["training"] if stages else []
    panels += ["routers", "sentinels", "tokens"] if sentinels else ["routers", "tokens"]
    panels += ["corpus"] if corpus_rows else []
    load_sentences = [balance_sentence(trace.layers)]
    if config.eval_capacity_field is None:
        load_sentences.append("There is no capacity in evaluation, so no token can be dropped.")

    # Fewer tokens for each of many experts.
    num_experts = sum(layer.facts.num_experts for layer in trace.layers)
    num_tokens = _LISTED_TOKENS if num_experts <= _MANY_EXPERTS else _FEW_TOKENS
    names = [layer_name(layer.key) for layer in trace.layers]
    shares = list(map(load_shares, trace.layers))
    page = render_page(
        "inspection.html",
        title=f"Report on {printable(folder)}",
        generator=GENERATOR,
        panels=[*panels, "source"],
        experts=experts,
        expert_sentences=expert_sentences,
        experts_layer=layer_name(trace.layers[-1].key),
        facts=[facts],
        recipe_text=recipe_text,
        sizes=report_text.size_sentence(config),
        load_map=draw_load(names, shares),
        health_header=HEALTH_HEADER,
        health_rows=health_rows(trace.layers),
        load_sentences=load_sentences,
        sentinel_header=SENTINEL_HEADER,
        sentinel_rows=sentinels,
        layers=[
            _expert_rows(
                tokenizer, layer, first_choices(trace, layer, config.vocab_size), num_tokens
            )
            for layer in trace.layers
        ],
        min_occurrences=MIN_OCCURRENCES,
        runs=[_run(config, folder, stage) for stage in stages],
        dev_scores=_dev_scores(stages),
        evaluations=reports,
        model_sentences=[model_sentences(fingerprint, report) for report in reports.values()],
        corpus_header=CORPUS_HEADER,
        corpus_rows=corpus_rows,
    )
    write_text(path, page)


# ---------------------------------------------------------------------------
# Tokens by expert


def _expert_rows(
    tokenizer: PreTrainedTokenizerFast, layer: LayerTrace, counts: Tensor, number: int
) -> Mapping[str, object]:
    """Returns the tokens that each expert of a layer receives and prefers, as the template reads them."""
    num_tokens = int(counts.sum())

    # The padding token that a decoder starts with is `<start>`; other padding is never in a trace.
    def named(tokens: Sequence[TokenCount]) -> list[tuple[str, TokenCount]]:
        names = piece_texts(tokenizer, [count.token for count in tokens])
        rows = []
        for name, count in zip(names, tokens, strict=True):
            is_start = layer.facts.stack == "decoder" and count.token == tokenizer.pad_token_id
            rows.append(("<start>" if is_start else name, count))
        return rows

    rows = []
    for expert in range(layer.facts.num_experts):
        share = int(counts[:, expert].sum()) / max(1, num_tokens)
        received = named(top_tokens(counts, expert, number=number))
        preferred = named(top_tokens(counts, expert, preferred=True, number=number))
        rows.append((expert + 1, f"{100 * share:.1f} %", received, preferred))
    return {"title": f"{layer_name(layer.key)}: {num_tokens:,} tokens", "experts": rows}


# ---------------------------------------------------------------------------
# Training


def _run(config: STMoEConfig, folder: Path, stage: Stage) -> Mapping[str, object]:
    """Returns the figures of a run and its last measurements, as the template reads them."""
    # The number of experts is known only for the run of the traced model.
    made_model = stage.made(folder)
    figures = []
    losses = _curves(stage.lines, _LOSSES)
    if losses and not stage.best_dev_line():
        ngrams = report_text.ngram_losses(stage.last("heldout/text_loss") or {})
        for name, loss in ngrams.items():
            losses += _level(stage.lines, f"{name} table", loss)
        panels = {"Cross-entropy": losses}
        figures.append(draw_curves(panels, y_label="nats per token", from_zero=False))

    # The routers of both stacks.
    panels = {}
    for metric, title in {
        "entropy": "Router entropy (nats)",
        "fraction_dropped": "Dropped tokens (%)",
    }.items():
        curves = _curves(
            stage.lines,
            {f"router/{stack}/{metric}": stack for stack in ("encoder", "decoder")},
            scale=100 if metric == "fraction_dropped" else 1,
        )
        if curves and metric == "entropy" and made_model:
            for number in sorted({layer.num_experts for layer in config.all_sparse_configs()}):
                curves += _level(stage.lines, f"uniform, ln {number}", math.log(number))
        if curves:
            panels[title] = curves
    if panels:
        figures.append(draw_curves(panels, y_label="", from_zero=True))
    return {
        "title": f"{stage.name}: the run of the traced model" if made_model else stage.name,
        "path": printable(stage.path),
        "sentences": report_text.run_sentences(stage),
        "figures": figures,
    }


def _dev_scores(stages: Sequence[Stage]) -> str | None:
    """Returns the dev scores of all fine-tunings in one figure; None without any."""
    curves = []
    for stage in stages:
        curves += _curves(stage.lines, {DEV_SCORE: stage.name})
    if not curves:
        return None
    return draw_curves({"": curves}, y_label="mean dev score (%)", from_zero=True)


def _curves(lines: Sequence[Line], names: Mapping[str, str], scale: float = 1) -> list[Curve]:
    """Returns a curve for each metric that was measured, times a scale; values that are not finite are gaps."""
    curves = []
    for metric, name in names.items():
        steps = []
        values = []
        for line in lines:
            if metric in line:
                steps.append(line["step"])
                values.append(scale * line[metric] if math.isfinite(line[metric]) else math.nan)
        if steps:
            curves.append((name, steps, values))
    return curves


def _level(lines: Sequence[Line], name: str, value: float) -> list[Curve]:
    """Returns a horizontal line over all steps, with its value in its name; none where it is not finite."""
    if not math.isfinite(value):
        return []
    return [(f"{name}: {value:.2f}", [lines[0]["step"], lines[-1]["step"]], [value, value])]
