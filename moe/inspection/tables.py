"""Tables of a routing trace: tokens by expert, load, entropy. Pure functions from counts to rows."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe.inspection.trace import LayerTrace, RoutingTrace
from moe.sparse.stats import summarize


class TokenCount(NamedTuple):
    """One token of an expert.

    Attributes:
        token: Token id.
        occurrences: How often the expert was its first choice.
        lift: Share of the token that the expert gets, over the expert's share of all tokens; 1 is no preference.
    """

    token: int
    occurrences: int
    lift: float


def top_tokens(counts: Tensor, expert: int, *, number: int = 12, least: int = 1) -> list[TokenCount]:
    """Returns the tokens that an expert receives most.

    Args:
        counts: <int64>[V, E].
        expert: Which one.
        number: Most tokens to return.
        least: Tokens seen less often in all are left out.
    """
    return _rank(counts, expert, by_lift=False, number=number, least=least)


def special_tokens(counts: Tensor, expert: int, *, number: int = 12, least: int = 20) -> list[TokenCount]:
    """Returns the tokens that an expert receives most beyond its share, by lift; arguments as in `top_tokens`."""
    return _rank(counts, expert, by_lift=True, number=number, least=least)


def _rank(counts: Tensor, expert: int, *, by_lift: bool, number: int, least: int) -> list[TokenCount]:
    """Returns the first tokens by lift or by count."""
    seen = counts.sum(dim=1)
    share = counts[:, expert].sum() / max(1, int(counts.sum()))
    lift = counts[:, expert] / seen.clamp(min=1) / share.clamp(min=1e-12)
    key = (lift if by_lift else counts[:, expert].double()).masked_fill((seen < least) | (counts[:, expert] == 0), -1.0)
    order = key.argsort(descending=True, stable=True)[:number].tolist()
    return [TokenCount(t, int(counts[t, expert]), float(lift[t])) for t in order if key[t] > 0]


def routing_entropy(counts: Tensor, tokens: Tensor) -> float:
    """Returns the entropy in nats of the experts that a class of tokens goes to; 0 for no token.

    Args:
        counts: <int64>[V, E].
        tokens: <bool>[V] the class.

    Source:
        ST-MoE (arXiv:2202.08906) Table 14: sentinels in the encoder are routed with less entropy than ln E.
    """
    load = counts[tokens].sum(dim=0).double()
    share = load / load.sum().clamp(min=1)
    return float(torch.special.entr(share).sum())


def load_shares(layer: LayerTrace) -> list[float]:
    """Returns each expert's share of the places that asked for a slot, before capacity; they add up to 1."""
    load = layer.stats.expert_load.double()
    return (load / load.sum().clamp(min=1)).tolist()


def layer_name(layer: LayerTrace) -> str:
    """Returns e.g. `encoder 1`: the stack and the number of the sparse layer, from 1."""
    return f"{layer.stack} {layer.layer + 1}"


HEALTH_HEADER = ["sparse layer", "dead experts", "dropped", "entropy (nats)", "load CV", "max / mean", "slots used"]


def health_rows(trace: RoutingTrace) -> list[list[str]]:
    """Returns a row for each layer under HEALTH_HEADER."""
    rows = []
    for layer in trace:
        summary = summarize(layer.stats)
        rows.append(
            [
                layer_name(layer),
                f"{summary['dead_experts']:.0f} of {layer.accepted.shape[1]}",
                f"{100 * summary['fraction_dropped']:.2f} %",
                f"{summary['entropy']:.2f}",
                f"{summary['load_cv']:.2f}",
                f"{summary['max_over_mean']:.2f}",
                f"{100 * summary['expert_usage']:.0f} %",
            ]
        )
    return rows


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns an aligned plain-text table."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(line.rstrip() for line in lines)
