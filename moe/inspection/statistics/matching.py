"""Compares the choices of two models, and matches their experts by the tokens that they share.

Expert numbers mean nothing across seeds and models: `choice_agreement` compares models whose experts
correspond by number, `match_traces` others.
"""

import math
from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from moe.errors import DataError
from moe.inspection.statistics.contingency import one_hot_choices
from moe.sparse.editing import LayerKey
from moe.tracing.trace import LayerTrace, Trace, layer_name


class Agreement(NamedTuple):
    """Agreement of two sets of choices for the same tokens.

    Attributes:
        share: Mean over tokens of the experts chosen in both, over those chosen; NaN without tokens.
        chance: Expected share if experts were drawn evenly: K / E.
        corrected: (share - chance) / (1 - chance): 0 by even chance, 1 for the same choices.
        load_chance: Expected share if tokens exchanged their choices: above `chance` when a
            few experts have most of the load, even if choices do not depend on tokens.
        load_corrected: `share` corrected for `load_chance`; for one choice, Cohen's kappa. NaN when
            chance alone gives 1.
    """

    share: float
    chance: float
    corrected: float
    load_chance: float
    load_corrected: float


def choice_agreement(a: Tensor, b: Tensor, num_experts: int) -> Agreement:
    """Returns the agreement of two sets of choices of the same tokens.

    If a token has more choices in one set, the larger number counts; tokens without choices in both
    are left out.

    Args:
        a: <any integer>[N] or [N, K] expert of each choice, -1 for none.
        b: <any integer>[N] or [N, K] expert of each choice in the other set.
        num_experts: E.

    Raises:
        DataError: When the shapes differ, or an expert is out of range.

    Source:
        OLMoE (arXiv:2409.02060) eq. 5.
    """
    # Experts chosen by each token.
    chosen_a = one_hot_choices(a, num_experts)  # [N, E]
    chosen_b = one_hot_choices(b, num_experts)
    if len(chosen_a) != len(chosen_b):
        raise DataError(
            f"The choices cover {len(chosen_a):,} and {len(chosen_b):,} tokens; expected the same tokens. Trace the "
            "same text with both."
        )

    # Experts that a token has in each, in both, and at most.
    num_a = chosen_a.sum(dim=1)  # [N]
    num_b = chosen_b.sum(dim=1)
    most = torch.maximum(num_a, num_b)
    is_counted = most > 0
    most = most[is_counted]
    common = (chosen_a * chosen_b).sum(dim=1)[is_counted]
    share = float((common / most).mean())

    # By chance: evenly, and by the load of both.
    fewest = torch.minimum(num_a, num_b)[is_counted]
    chance = float(fewest.mean()) / num_experts
    load_a = chosen_a[is_counted].mean(dim=0)  # [E]
    load_b = chosen_b[is_counted].mean(dim=0)
    load_chance = float(load_a @ load_b / most.mean())
    return Agreement(
        share=share,
        chance=chance,
        corrected=_corrected(share, chance),
        load_chance=load_chance,
        load_corrected=_corrected(share, load_chance),
    )


def _corrected(share: float, chance: float) -> float:
    return (share - chance) / (1 - chance) if chance < 1 else math.nan


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

    Raises:
        DataError: When they are of different numbers of tokens.

    Source:
        Kuhn, The Hungarian method for the assignment problem (1955); Hubert and Arabie, Comparing
        partitions (1985).
    """
    if len(a.first) != len(b.first):
        raise DataError(
            f"The layers have {len(a.first):,} and {len(b.first):,} tokens; expected the same tokens. Trace the same "
            "text with both models, and compare a layer with one of the same stack."
        )

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
        DataError: When the inputs differ, or the models have other sparse layers.
    """
    if a.facts.inputs_fingerprint != b.facts.inputs_fingerprint:
        raise DataError(
            f"The traces were recorded on inputs {a.facts.inputs_fingerprint[:12]!r} and "
            f"{b.facts.inputs_fingerprint[:12]!r}; expected the same inputs. Trace the same text with both models, "
            "with one tokenizer."
        )
    layers_a = {layer.key: layer for layer in a.layers}
    layers_b = {layer.key: layer for layer in b.layers}
    if layers_a.keys() != layers_b.keys():
        names = [", ".join(map(layer_name, layers)) for layers in (layers_a, layers_b)]
        raise DataError(
            f"The traces have the sparse layers {names[0] or 'none'} and {names[1] or 'none'}; expected the same. "
            "Compare single layers with match_experts."
        )
    return {key: match_experts(layers_a[key], layers_b[key]) for key in layers_a}


def adjusted_rand(counts: Tensor) -> float:
    """Returns the agreement of two groupings of tokens beyond chance: 0 by chance, 1 for the same.

    Args:
        counts: <int64>[E, E'] tokens by their groups in both.

    Returns:
        1 where both put all tokens into one group, or each into its own; NaN without tokens.

    Source:
        Hubert and Arabie, Comparing partitions (1985).
    """
    num_tokens = int(counts.sum())
    if not num_tokens:
        return math.nan

    # Pairs of tokens that are together in both, and in each.
    together = _pairs(counts).sum()
    in_a = _pairs(counts.sum(dim=1)).sum()
    in_b = _pairs(counts.sum(dim=0)).sum()
    pairs = num_tokens * (num_tokens - 1) / 2
    expected = float(in_a * in_b) / pairs if pairs else 0.0
    most = float(in_a + in_b) / 2
    if most == expected:
        return 1.0
    return (float(together) - expected) / (most - expected)


def _pairs(counts: Tensor) -> Tensor:
    counts = counts.double()
    return counts * (counts - 1) / 2
