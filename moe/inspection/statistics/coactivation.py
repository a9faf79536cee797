"""Which experts are chosen together: in one layer, and from one layer to the next.

Comes after permutations.py and contingency.py.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from moe.inspection.statistics.contingency import mutual_information, normalized_information
from moe.inspection.statistics.permutations import (
    DocumentShuffle,
    Shuffle,
    TokenPlaces,
    check_permutations,
    check_tokens,
    share_at_least,
    shuffled_tables,
)
from moe.inspection.statistics.specialization import chosen_experts
from moe.sparse.editing import LayerKey
from moe.tracing.trace import LayerTrace, StackTrace

_ROUNDS = 200
_CLOSE = 1e-9


class Coactivation(NamedTuple):
    """Which experts of one layer tokens choose together.

    Attributes:
        layer: Its stack and number.
        counts: <int64>[E, E] tokens that request both experts; on the diagonal, that one.
        share: <float64>[E, E] share of the tokens requesting the row's expert that also request the
            column's; NaN in the row of an expert that no token requests.
        preference: <float64>[E, E] counts over what experts that combine at random, each as often as
            it does, would have; 1 is no preference, NaN on the diagonal and for experts in no pair.
        even_share: (K - 1) / (E - 1): the share at even load without preference.
    """

    layer: LayerKey
    counts: Tensor
    share: Tensor
    preference: Tensor
    even_share: float


def coactivation(layer: LayerTrace) -> Coactivation:
    """Returns which experts of a layer tokens request together, before capacity.

    With one choice a token, nothing is off the diagonal.

    Args:
        layer: The layer's part of a trace.

    Source:
        OLMoE (arXiv:2409.02060) eq. 6.
    """
    # N_ij, and on the diagonal N_i.
    chosen = chosen_experts(layer, "all")  # [N, E]
    counts = chosen.T @ chosen  # [E, E]
    tokens = counts.diagonal()  # [E]

    # Shares of the row's expert.
    share = counts / tokens[:, None]
    num_experts = layer.facts.num_experts
    num_others = layer.facts.num_choices - 1
    return Coactivation(
        layer=layer.key,
        counts=counts.long(),
        share=share,
        preference=counts / _expected_pairs(counts),
        even_share=num_others / (num_experts - 1) if num_experts > 1 else 0.0,
    )


def _expected_pairs(counts: Tensor) -> Tensor:
    """Returns <float64>[E, E]: pairs without preference, with each expert in as many pairs.

    They are a_i a_j off the diagonal, so that their sums match the counts (quasi-independence, by proportional
    fitting); NaN on the diagonal.
    """
    # Number of pairs with each expert.
    is_pair = ~torch.eye(len(counts), dtype=torch.bool)
    pairs = counts.double() * is_pair
    sums = pairs.sum(dim=1)  # [E]

    # Weights that give as many; an expert without pairs has a weight of 0.
    weight = sums.sqrt()
    for _ in range(_ROUNDS):
        others = weight.sum() - weight
        fitted = weight * others
        ratio = torch.where(fitted > 0, sums / fitted, torch.zeros_like(sums))
        weight = weight * ratio.sqrt()
        off = (ratio - 1).masked_fill(sums == 0, 0).abs()
        if bool((off < _CLOSE).all()):
            break
    expected = weight[:, None] * weight
    return expected.masked_fill(~is_pair, math.nan)


class Flow(NamedTuple):
    """Transitions of tokens from the experts of one sparse layer to those of the next.

    Attributes:
        layer: The first layer's stack and number.
        next_layer: The other's.
        counts: <int64>[E, E'] tokens by their first choices in both.
        share: <float64>[E, E'] P(j in the next layer | i in this one); NaN in the row of an expert
            that no token chose.
        mutual_information: In nats.
        information: Share of the entropy of the next layer's routing that this one's explains: I / H.
            NaN where the next layer has one expert.
        chance: Its mean over shuffles.
        p_value: Share of shuffles with as much.
    """

    layer: LayerKey
    next_layer: LayerKey
    counts: Tensor
    share: Tensor
    mutual_information: float
    information: float
    chance: float
    p_value: float


def layer_flows(
    stack: StackTrace,
    places: TokenPlaces,
    *,
    null: type[Shuffle] = DocumentShuffle,
    num_permutations: int = 99,
    seed: int = 0,
) -> list[Flow]:
    """Returns the flow from each sparse layer of a stack to the next one; none for a single layer.

    Args:
        stack: The stack's part of a trace.
        places: Positions of its tokens, see `token_places`.
        null: Null hypothesis; see `moe.inspection.statistics.permutations`.
        num_permutations: Shuffles.
        seed: Seed of the shuffles.

    Raises:
        ConfigError: When `num_permutations` or `seed` is out of range.
        DataError: When the places belong to other tokens, or there are too few documents for `null`.

    Source:
        OLMoE (arXiv:2409.02060) appendix G, as shares; the information is ours.
    """
    check_permutations(num_permutations, seed)
    check_tokens("The places", len(places.position), len(stack.ids))
    if len(stack.layers) < 2:
        return []

    shuffle = null(places)
    flows = []
    for layer, next_layer in pairwise(stack.layers):
        # First choices in both layers, observed and then shuffled; the last row means no expert.
        num_experts = layer.facts.num_experts
        first = layer.first.long()
        rows = first.masked_fill(first < 0, num_experts).numpy()
        draws = shuffled_tables(
            rows, num_experts + 1, [next_layer], shuffle, num_permutations, seed
        )
        tables = torch.stack([table[:-1] for (table,) in draws])  # [R, E, E']

        # How much the expert of this layer (row) explains of the expert of the other (column).
        information = normalized_information(tables.mT).round(decimals=12)
        p_value = share_at_least(information, information[:1])

        counts = tables[0]
        flows.append(
            Flow(
                layer=layer.key,
                next_layer=next_layer.key,
                counts=counts,
                share=counts.double() / counts.sum(dim=1, keepdim=True),
                mutual_information=float(mutual_information(counts)),
                information=float(information[0]),
                chance=float(information[1:].mean()),
                p_value=float(p_value),
            )
        )
    return flows
