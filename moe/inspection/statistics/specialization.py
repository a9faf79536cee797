"""Specialization of experts: classes of tokens by expert, and whether it exceeds chance.

Comes after token_classes.py and permutations.py. First choices are counted, before capacity.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor

from moe.checks import check_choice
from moe.inspection.statistics.contingency import normalized_information, one_hot_choices
from moe.inspection.statistics.permutations import (
    DocumentShuffle,
    Shuffle,
    TokenPlaces,
    check_permutations,
    check_tokens,
    share_at_least,
    shuffled_tables,
)
from moe.inspection.statistics.token_classes import TokenClasses
from moe.sparse.editing import LayerKey
from moe.tracing.trace import LayerTrace


class ClassTable(NamedTuple):
    """Classes by experts of one layer; a token may belong to several classes, or to none.

    Attributes:
        layer: Its stack and number.
        names: The C classes.
        counts: <int64>[C, E] tokens of a class that chose an expert.
        tokens: <int64>[C] tokens of a class that chose any.
        load: <float64>[E] share of all such tokens that chose an expert.
        share: <float64>[C, E] counts over tokens; NaN in a class without tokens.
        lift: <float64>[C, E] share over load: 1 is no preference; NaN where either is unknown.
    """

    layer: LayerKey
    names: tuple[str, ...]
    counts: Tensor
    tokens: Tensor
    load: Tensor
    share: Tensor
    lift: Tensor


def class_table(layer: LayerTrace, classes: TokenClasses, *, choices: str = "first") -> ClassTable:
    """Returns classes by experts of a layer.

    With `domain_classes` this is domain specialisation: a row is a kind of text, and without
    preference a share is 1 / E, or with all choices K / E.

    Args:
        layer: The layer's part of a trace.
        classes: Classes of the same stack's tokens.
        choices: `first`, or `all`: each of the K choices of a token counts, so that the shares of a
            class add up to the choices that its tokens have.

    Raises:
        ConfigError: When `choices` is another word.
        DataError: When the classes belong to other tokens.

    Source:
        OLMoE (arXiv:2409.02060) eq. 7. Differs: choices are counted before capacity.
    """
    chosen = chosen_experts(layer, choices)  # [N, E]
    check_tokens("The classes", classes.members.shape[1], len(chosen))

    # One product counts all cells.
    members = classes.members.double()
    counts = einsum(members, chosen, "c n, n e -> c e")
    has_choice = chosen.any(dim=1).double()
    tokens = einsum(members, has_choice, "c n, n -> c")
    load = chosen.sum(dim=0) / has_choice.sum()

    share = counts / tokens[:, None]
    lift = share / load
    return ClassTable(
        layer=layer.key,
        names=classes.names,
        counts=counts.long(),
        tokens=tokens.long(),
        load=load,
        share=share,
        lift=lift.masked_fill(load == 0, math.nan),
    )


def chosen_experts(layer: LayerTrace, choices: str) -> Tensor:
    """Returns <float64>[N, E]: 1 where a token chose an expert.

    Args:
        layer: The layer's part of a trace.
        choices: `first` or `all`.

    Raises:
        ConfigError: When `choices` is another word.
    """
    check_choice("choices", choices, ("first", "all"))
    experts = layer.first if choices == "first" else layer.choices
    return one_hot_choices(experts, layer.facts.num_experts)


class SpecializationTest(NamedTuple):
    """Whether classes and experts of one layer are related more than by chance.

    Attributes:
        layer: Its stack and number.
        names: The C classes.
        p_value: <float64>[C, E] of each cell, two-sided and corrected for all cells of all tested
            layers: by chance, any of them is at or below p with probability p. 1 in a class without
            tokens.
        information: Share of the entropy of the class that the expert explains, from 0 to 1: I(class;
            expert) / H(class), where each token counts for its first class, or for none. NaN when
            all tokens belong to one class.
        chance: Its mean over shuffles, which is above 0.
        information_p: Share of shuffles with as much.
    """

    layer: LayerKey
    names: tuple[str, ...]
    p_value: Tensor
    information: float
    chance: float
    information_p: float


def specialization_test(
    layers: Sequence[LayerTrace],
    classes: TokenClasses,
    places: TokenPlaces,
    *,
    null: type[Shuffle] = DocumentShuffle,
    num_permutations: int = 1000,
    seed: int = 0,
) -> list[SpecializationTest]:
    """Returns for each layer which classes and experts are related more than by chance.

    Experts are shuffled between tokens, in all layers alike. A cell's p-value is the share of
    shuffles in which any cell of any given layer deviates as much: so a table of a hundred cells may
    be read cell by cell.

    Args:
        layers: Layers of one stack.
        classes: Classes of its tokens.
        places: Positions of the tokens, see `token_places`.
        null: Null hypothesis: exchanges whole documents; `TokenShuffle` exchanges tokens, and so
            assumes that tokens of a document are independent.
        num_permutations: Shuffles; the smallest p-value is 1 / (this + 1).
        seed: Seed of the shuffles.

    Raises:
        ConfigError: When `num_permutations` or `seed` is out of range.
        DataError: When the classes, the places and the layers are not of the same tokens, or the
            documents are too few for `null`.

    Source:
        Westfall and Young, Resampling-Based Multiple Testing (1993): the maximum over cells.
    """
    # All must be of the same tokens.
    check_permutations(num_permutations, seed)
    for layer in layers:
        num_tokens = len(layer.first)
        check_tokens("The classes", classes.members.shape[1], num_tokens)
        check_tokens("The places", len(places.position), num_tokens)
    if not layers:
        return []

    # Tokens of the same classes are alike: patterns are counted, not tokens.
    pattern, kinds = _patterns(classes)
    num_kinds = kinds.members.shape[1]
    shuffle = null(places)
    draws = shuffled_tables(pattern, num_kinds, layers, shuffle, num_permutations, seed)
    tables = [torch.stack(of_layer).double() for of_layer in zip(*draws, strict=True)]

    # Deviations of the cells: in the actual table, which comes first, and in the shuffled ones.
    of_kind = kinds.members.double()
    surprises = []
    for table in tables:
        counts = einsum(of_kind, table, "c p, r p e -> r c e")
        surprises.append(_surprise(counts))  # [R, C, E]
    most = torch.stack([surprise.amax(dim=(1, 2)) for surprise in surprises])
    most_of_all = most.amax(dim=0)  # [R]

    # Cells against the most surprising cell of each shuffle, the layer against its shuffles.
    tests = []
    for layer, table, surprise in zip(layers, tables, surprises, strict=True):
        p_value = share_at_least(most_of_all, surprise[0])
        information = _information_of_kinds(table, kinds)  # [R]
        at_least = share_at_least(information, information[:1])
        tests.append(
            SpecializationTest(
                layer=layer.key,
                names=classes.names,
                p_value=p_value,
                information=float(information[0]),
                chance=float(information[1:].mean()),
                information_p=float(at_least),
            )
        )
    return tests


def _patterns(classes: TokenClasses) -> tuple[np.ndarray, TokenClasses]:
    """Returns <int64>[N]: the pattern of classes of each token, and the patterns as P tokens."""
    rows = rearrange(classes.members, "c n -> n c").numpy()
    kinds, pattern = np.unique(rows, axis=0, return_inverse=True)
    members = rearrange(torch.from_numpy(kinds), "p c -> c p")
    return pattern.reshape(-1), TokenClasses(classes.names, members)


def _surprise(counts: Tensor) -> Tensor:
    """Returns <float64>[R, C, E]: how far each count is from the mean of all R, in standard deviations.

    Counts are raised to the power 2/3, which makes the counts of rare classes symmetric (Anscombe, 1953); otherwise the
    largest deviation would always be in a cell with hardly any expected counts.
    """
    roots = counts ** (2 / 3)
    distance = (roots - roots.mean(dim=0)).abs()
    deviation = roots.std(dim=0, correction=0)
    standard = distance / deviation.clamp(min=1e-9)

    # Equal deviations must not differ by rounding.
    return standard.masked_fill(deviation < 1e-9, 0).round(decimals=6)


def _information_of_kinds(table: Tensor, kinds: TokenClasses) -> Tensor:
    """Returns <float64>[R] I / H of <float64>[R, P, E]; a pattern is of its first class."""
    num_kinds = len(kinds.names) + 1  # the last means no class
    one_hot = F.one_hot(kinds.first, num_kinds).double()
    counts = einsum(one_hot, table, "p c, r p e -> r c e")
    return normalized_information(counts).round(decimals=12)
