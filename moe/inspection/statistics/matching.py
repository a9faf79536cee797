"""Matches the experts of two models by the tokens that they share.

Expert numbers mean nothing across seeds and models.
"""

import math
from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from moe.errors import DataError
from moe.inspection.statistics.contingency import adjusted_rand
from moe.sparse.editing import LayerKey
from moe.tracing.trace import LayerTrace, Trace, layer_name


class ExpertMatching(NamedTuple):
    """The experts of one layer of a model matched with those of another model.

    Attributes:
        counts: <int64>[E, E'] tokens by their first choices in both.
        partner: <int64>[E] the other model's matching expert; -1 for none, when it has fewer.
        agreement: Share of tokens whose experts are partners; NaN without tokens. Matching makes it
            as large as possible, so that it is above 1 / E by chance, too.
        adjusted_rand: Agreement of the two groupings of tokens beyond chance, whatever the
            experts are called: 0 by chance, 1 for the same groups.
    """

    counts: Tensor
    partner: Tensor
    agreement: float
    adjusted_rand: float


def match_experts(a: LayerTrace, b: LayerTrace) -> ExpertMatching:
    """Returns the experts of two layers matched, by first choices on the same tokens.

    Tokens without an expert in one of them are left out.

    Args:
        a: A layer's part of a trace.
        b: A layer's part of another trace of the same inputs; see `match_traces`.

    Source:
        Kuhn, The Hungarian method for the assignment problem (1955); Hubert and Arabie, Comparing
        partitions (1985).
    """
    # Tokens by their experts in both.
    num_a = a.facts.num_experts
    num_b = b.facts.num_experts
    has_both = (a.first >= 0) & (b.first >= 0)
    cell = a.first[has_both].long() * num_b + b.first[has_both].long()
    counts = torch.bincount(cell, minlength=num_a * num_b).reshape(num_a, num_b)  # [E, E']

    # Partners, and the tokens that they share.
    rows, columns = linear_sum_assignment(counts.numpy(), maximize=True)
    partner = torch.full((num_a,), -1)
    partner[rows] = torch.as_tensor(columns)
    shared = counts[rows, columns].sum()
    num_tokens = len(cell)
    return ExpertMatching(
        counts=counts,
        partner=partner,
        agreement=int(shared) / num_tokens if num_tokens else math.nan,
        adjusted_rand=adjusted_rand(counts),
    )


def match_traces(a: Trace, b: Trace) -> dict[LayerKey, ExpertMatching]:
    """Returns the experts of two models matched, layer by layer; see `match_experts`.

    Args:
        a: A trace, with experts <int8 or int16>[N, K] in each layer.
        b: Another model's trace of the same inputs.

    Raises:
        DataError: When the models have other sparse layers.
    """
    layers_a = {layer.key: layer for layer in a.layers}
    layers_b = {layer.key: layer for layer in b.layers}
    if layers_a.keys() != layers_b.keys():
        names = [", ".join(map(layer_name, layers)) for layers in (layers_a, layers_b)]
        raise DataError(
            f"The traces have the sparse layers {names[0] or 'none'} and {names[1] or 'none'}; expected the same. "
            "Compare single layers with match_experts."
        )
    return {key: match_experts(layers_a[key], layers_b[key]) for key in layers_a}
