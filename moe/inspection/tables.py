"""Tables of a routing trace: tokens by expert, load, entropy. Pure functions from counts to rows."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from moe.inspection.trace import LayerTrace, RoutingTrace
from moe.sparse.stats import summarize

_SMOOTHING = 20
"""Occurrences, routed as all tokens are, that lift adds to those of a token: a rare token then needs more evidence."""


LEAST_SEEN = 10
"""Occurrences of a token below which no expert is said to prefer it, as in OLMoE (arXiv:2409.02060)."""


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


def top_tokens(counts: Tensor, expert: int, *, number: int = 12) -> list[TokenCount]:
    """Returns the tokens that an expert receives most, by falling count.

    Args:
        counts: <int64>[V, E].
        expert: Which one.
        number: Most tokens to return.
    """
    received = counts[:, expert]
    return _tokens_by(received.double(), received > 0, counts, expert, number)


def special_tokens(counts: Tensor, expert: int, *, number: int = 12) -> list[TokenCount]:
    """Returns the tokens that an expert prefers, by falling lift; arguments as in `top_tokens`."""
    lift = smoothed_lift(counts, expert)
    return _tokens_by(lift, (lift > 1) & (counts.sum(dim=1) >= LEAST_SEEN), counts, expert, number)


def smoothed_lift(counts: Tensor, expert: int) -> Tensor:
    """Returns <float64>[V]: how much an expert prefers each token, 1 for no preference.

    It is the expert's share of the token over its share q of all tokens, as if the token had been
    seen 20 times more
    and routed as all tokens are: (k / q + 20) / (n + 20) for k of n occurrences. Without that every
    token that never goes elsewhere has 1 / q, whether it was seen once or a thousand times.

    Args:
        counts: <int64>[V, E].
        expert: Which one.
    """
    k = counts[:, expert].double()  # [V]
    n = counts.sum(dim=1).double()  # [V]
    q = k.sum() / n.sum().clamp(min=1)
    return (k / q.clamp(min=1e-12) + _SMOOTHING) / (n + _SMOOTHING)


def _tokens_by(
    key: Tensor, listed: Tensor, counts: Tensor, expert: int, number: int
) -> list[TokenCount]:
    """Returns the first tokens by falling key <float64>[V], of those that are to be listed
    <bool>[V].
    """
    lift = smoothed_lift(counts, expert)
    seen = counts.sum(dim=1)
    order = (
        key.masked_fill(~listed, -math.inf).argsort(descending=True, stable=True)[:number].tolist()
    )
    return [
        TokenCount(token, int(counts[token, expert]), int(seen[token]), float(lift[token]))
        for token in order
        if listed[token]
    ]


def routing_entropy(counts: Tensor, tokens: Tensor) -> float:
    """Returns the entropy in nats of the experts that a class of tokens goes to; 0 for no token.

    Args:
        counts: <int64>[V, E].
        tokens: <bool>[V] the class.

    Source:
        ST-MoE (arXiv:2202.08906) Table 14: sentinels in the encoder are routed with less entropy
        than ln E.
    """
    load = counts[tokens].sum(dim=0).double()
    share = load / load.sum().clamp(min=1)
    return float(torch.special.entr(share).sum())


def load_shares(layer: LayerTrace) -> list[float]:
    """Returns each expert's share of the places that asked for a slot, before capacity; they add up
    to 1.
    """
    load = layer.stats.expert_load.double()
    return (load / load.sum().clamp(min=1)).tolist()


def layer_name(layer: LayerTrace) -> str:
    """Returns e.g. `encoder 1`: the stack and the number of the sparse layer, from 1."""
    return f"{layer.stack} {layer.layer + 1}"


def token_names(
    tokenizer: PreTrainedTokenizerFast, layer: LayerTrace, tokens: Sequence[int]
) -> list[str]:
    """Returns how tokens of a layer are shown; the padding token that a decoder starts with is
    `<start>`.

    Other padding is never in a trace.
    """
    names = []
    for token in tokens:
        name = tokenizer.convert_ids_to_tokens(token)
        starts = layer.stack == "decoder" and token == tokenizer.pad_token_id
        names.append("<start>" if starts else str(name))
    return names


HEALTH_HEADER = [
    "sparse layer",
    "dead experts",
    "dropped",
    "entropy (nats)",
    "load CV",
    "max / mean",
    "slots used",
]


def health_rows(trace: RoutingTrace) -> list[list[str]]:
    """Returns a row for each layer under HEALTH_HEADER; entropy stands beside ln E, the largest
    there is.
    """
    rows = []
    for layer in trace:
        summary = summarize(layer.stats)
        num_experts = layer.accepted.shape[1]
        rows.append(
            [
                layer_name(layer),
                f"{summary['dead_experts']:.0f} of {num_experts}",
                f"{100 * summary['fraction_dropped']:.2f} %",
                f"{summary['entropy']:.2f} of {math.log(num_experts):.2f}",
                f"{summary['load_cv']:.2f}",
                f"{summary['max_over_mean']:.2f}",
                f"{100 * summary['expert_usage']:.0f} %",
            ]
        )
    return rows


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns an aligned plain-text table."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (header, *rows)
    ]
    return "\n".join(line.rstrip() for line in lines)
