"""Tables of a trace: tokens by expert, load, entropy. Pure functions from counts to rows."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from moe.sparse.stats import RouterStats
from moe.tracing.trace import LayerTrace, Trace, layer_name

_SMOOTHING = 20
"""Pseudo-occurrences, routed like all tokens, that lift adds to each token: a rare token then needs more evidence."""

MIN_OCCURRENCES = 10
"""Tokens with fewer occurrences have no preferred expert, as in OLMoE (arXiv:2409.02060)."""

_LONG_TEXT = 1_000
"""Number of targets from which their unigram entropy approximates that of the language."""

HEALTH_HEADER = [
    "sparse layer",
    "dead experts",
    "dropped tokens",
    "entropy (nats)",
    "load CV",
    "max / mean",
    "slots used",
]


def first_choices(trace: Trace, layer: LayerTrace, vocab_size: int) -> Tensor:
    """Returns <int64>[V, E]: how often each token id has an expert of a layer as its first choice.

    The decoder's tokens are its inputs.

    Source:
        ST-MoE (arXiv:2202.08906) §7: tokens by expert and layer.
    """
    ids = trace.stack(layer.facts.stack).ids.long()  # [N]
    first = layer.first.long()  # [N]
    has_first = first >= 0
    num_experts = layer.facts.num_experts
    cells = (ids * num_experts + first)[has_first]
    counts = torch.bincount(cells, minlength=vocab_size * num_experts)
    return rearrange(counts, "(v e) -> v e", e=num_experts)


# ---------------------------------------------------------------------------
# Tokens by expert


class TokenCount(NamedTuple):
    """One token of an expert.

    Attributes:
        token: Token id.
        occurrences: How often the expert was its first choice.
        seen: How often any expert was.
        lift: Smoothed share of the token that the expert gets, over the expert's share of all
            tokens; 1 is no preference.
    """

    token: int
    occurrences: int
    seen: int
    lift: float


def top_tokens(
    counts: Tensor, expert: int, *, preferred: bool = False, number: int = 12
) -> list[TokenCount]:
    """Returns the tokens that an expert receives most, by falling count.

    Args:
        counts: <int64>[V, E] first choices.
        expert: Number of the expert, from 0.
        preferred: Whether to return the tokens that it prefers, by falling lift.
        number: Largest number of tokens to return.
    """
    lift = smoothed_lift(counts, expert)  # [V]
    seen = counts.sum(dim=1)  # [V]
    received = counts[:, expert]  # [V]
    values = received.double()
    is_listed = received > 0
    if preferred:
        values = lift
        is_listed = (lift > 1) & (seen >= MIN_OCCURRENCES)

    # Tokens that are not listed come last.
    order = values.masked_fill(~is_listed, -math.inf).argsort(descending=True, stable=True)
    tokens = []
    for token in order[: min(number, int(is_listed.sum()))].tolist():
        tokens.append(TokenCount(token, int(received[token]), int(seen[token]), float(lift[token])))
    return tokens


def smoothed_lift(counts: Tensor, expert: int) -> Tensor:
    """Returns an expert's preference for each token; 1 means no preference.

    It is the expert's share of the token over its share q of all tokens, as if the token had been
    seen 20 times more and routed like all tokens: (k / q + 20) / (n + 20) for k of n occurrences.
    Without smoothing, a token that is only routed to this expert would have 1 / q after one
    occurrence as after a thousand.

    Args:
        counts: <int64>[V, E] first choices.
        expert: Number of the expert, from 0.

    Returns:
        <float64>[V] lift of each token.
    """
    k = counts[:, expert].double()  # [V]
    n = counts.sum(dim=1).double()  # [V]
    q = k.sum() / n.sum().clamp(min=1)
    return (k / q.clamp(min=1e-12) + _SMOOTHING) / (n + _SMOOTHING)


# ---------------------------------------------------------------------------
# Load and entropy


def health_rows(layers: Sequence[LayerTrace]) -> list[list[str]]:
    """Returns a row for each layer under HEALTH_HEADER.

    Entropy is shown with its largest possible value, ln E.
    """
    rows = []
    for layer in layers:
        summary = layer.stats.summary()
        num_experts = layer.stats.expert_load.numel()
        rows.append(
            [
                layer_name(layer.key),
                f"{summary['dead_experts']:.0f} of {num_experts}",
                f"{100 * summary['fraction_dropped']:.2f} %",
                f"{summary['entropy']:.2f} of {math.log(num_experts):.2f}",
                f"{summary['load_cv']:.2f}",
                f"{summary['max_over_mean']:.2f}×",
                f"{100 * summary['expert_usage']:.0f} %",
            ]
        )
    return rows


def balance_sentence(layers: Sequence[LayerTrace]) -> str:
    """Returns how far the busiest experts are above the mean load, over all layers."""
    violations = RouterStats.max_violations([layer.stats for layer in layers])
    return (
        f"MaxVio over the {len(layers)} sparse layers (how far the busiest expert is above the mean load): "
        f"median {violations['max_vio_p50']:.2f}, 95th percentile {violations['max_vio_p95']:.2f}."
    )


# ---------------------------------------------------------------------------
# Plain text


def health_text(layers: Sequence[LayerTrace]) -> str:
    """Returns the table of `health_rows`, and below it `balance_sentence`."""
    return f"{format_table(HEALTH_HEADER, health_rows(layers))}\n{balance_sentence(layers)}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns an aligned plain-text table."""
    lines = [header, *rows]

    # Columns are as wide as their widest cell.
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    texts = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


# ---------------------------------------------------------------------------
# The loss on what was traced


def unigram_entropy(targets: Tensor) -> float:
    """Returns the entropy in nats of the frequencies of targets, which no unigram model beats.

    Args:
        targets: <int>[N] token ids.
    """
    counts = torch.bincount(targets.long()).double()  # [V]
    return float(torch.special.entr(counts / counts.sum()).sum())


def loss_sentence(trace: Trace) -> str:
    """Returns the loss of the traced model next to the unigram entropy, with a warning if it is higher.

    There is no warning for a short text, whose entropy is estimated too low.
    """
    loss = trace.facts.loss
    targets = trace.decoder.targets
    entropy = unigram_entropy(targets)
    text = f"The loss is {loss:.2f} nats for each target, the unigram entropy of the targets {entropy:.2f}."
    if loss <= entropy or targets.numel() < _LONG_TEXT:
        return text
    return (
        f"{text} Warning: the frequencies alone predict these targets better than the model does, so its routing of "
        "this text tells little. Trace text like that of its training: a model that was fine-tuned on a task has "
        "forgotten span corruption (give --task or --pairs to stmoe inspect record), and one that was only pre-trained "
        "knows no task (give --corpus or --text)."
    )
