"""report.html: which experts serve which kinds of text, and what each expert receives.

Panels without data are left out.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerFast

from moe.data.tokenizer import piece_texts
from moe.files import write_text
from moe.inspection.figures import draw_experts_by_domain
from moe.inspection.html_page import render_page
from moe.inspection.page import report_text
from moe.inspection.tables import (
    HEALTH_HEADER,
    MIN_OCCURRENCES,
    TokenCount,
    balance_sentence,
    first_choices,
    health_rows,
    top_tokens,
)
from moe.models.configuration import STMoEConfig
from moe.parsing import printable
from moe.tracing.trace import LayerTrace, Trace, layer_name

# Tokens listed for an expert; fewer where the page would be too long to read.
_LISTED_TOKENS = 12
_FEW_TOKENS = 4
_MANY_EXPERTS = 200


def write_report(
    path: Path,
    *,
    config: STMoEConfig,
    tokenizer: PreTrainedTokenizerFast,
    trace: Trace,
    folder: Path,
    facts: Sequence[tuple[str, str]],
) -> None:
    """Writes the page, whole or not at all.

    Args:
        path: The .html file.
        config: Config of the traced model, which has a sparse layer.
        tokenizer: Names the tokens.
        trace: Its routing of held-out examples.
        folder: Folder of the model.
        facts: Names and texts about the trace; `names` in backquotes are set as code.
    """
    experts = None
    expert_sentences = []
    if len(trace.facts.domains) > 1:
        tables, groups = report_text.tables_by_domain(trace)
        shares = report_text.expert_shares(tables[-1]).tolist()
        numbers = report_text.experts_of_most(tables[-1]).tolist()
        experts = draw_experts_by_domain(shares, tables[-1].names, numbers, groups)
        expert_sentences = report_text.domain_sentences(tables)
    panels = ["routers", "tokens", "source"]
    load_sentences = [balance_sentence(trace.layers)]
    if config.eval_capacity_field is None:
        load_sentences.append("There is no capacity in evaluation, so no token can be dropped.")

    # Fewer tokens for each of many experts.
    num_experts = sum(layer.facts.num_experts for layer in trace.layers)
    num_tokens = _LISTED_TOKENS if num_experts <= _MANY_EXPERTS else _FEW_TOKENS
    layers = []
    for layer in trace.layers:
        counts = first_choices(trace, layer, config.vocab_size)
        layers.append(_expert_rows(tokenizer, layer, counts, num_tokens))
    page = render_page(
        "inspection.html",
        title=f"Report on {printable(folder)}",
        generator="stmoe inspect report",
        panels=["experts", *panels] if experts else panels,
        experts=experts,
        expert_sentences=expert_sentences,
        experts_layer=layer_name(trace.layers[-1].key),
        facts=[facts],
        sizes=report_text.size_sentence(config),
        health_header=HEALTH_HEADER,
        health_rows=health_rows(trace.layers),
        load_sentences=load_sentences,
        layers=layers,
        min_occurrences=MIN_OCCURRENCES,
    )
    write_text(path, page)


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
