"""Specialization of experts: classes of tokens by expert, and whether it exceeds chance.

Comes after token_classes.py and permutations.py. First choices are counted, before capacity.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from einops import einsum
from torch import Tensor

from moe.errors import DataError
from moe.inspection.statistics.permutations import DocumentShuffle
from moe.inspection.statistics.token_classes import TokenClasses
from moe.sparse.editing import LayerKey
from moe.tracing.trace import LayerTrace, StackTrace


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


def class_table(layer: LayerTrace, classes: TokenClasses) -> ClassTable:
    """Returns classes by experts of a layer.

    With `domain_classes` this is domain specialisation: a row is a kind of text, and without
    preference a share is 1 / E.

    Args:
        layer: The layer's part of a trace.
        classes: Classes of the same stack's tokens.

    Raises:
        DataError: When the classes belong to other tokens.

    Source:
        OLMoE (arXiv:2409.02060) eq. 7. Differs: choices are counted before capacity.
    """
    num_tokens = classes.members.shape[1]
    if num_tokens != len(layer.first):
        raise DataError(
            f"The classes cover {num_tokens:,} tokens; expected {len(layer.first):,}, those of the layer. Take both "
            "from the same stack of one trace."
        )

    # One product counts all cells.
    chosen = one_hot_first(layer)  # [N, E]
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


def one_hot_first(layer: LayerTrace) -> Tensor:
    """Returns <float64>[N, E]: 1 for the first choice of each token."""
    one_hot = F.one_hot(layer.first.long() + 1, layer.facts.num_experts + 1)  # -1 is no choice
    return one_hot[:, 1:].double()


def class_p_values(
    stack: StackTrace,
    groups: Sequence[TokenClasses],
    document: Tensor,
    *,
    num_permutations: int = 1000,
    seed: int = 0,
) -> list[list[Tensor]]:
    """Returns for groups of classes, in each layer, whether classes and experts are related more than by chance.

    Experts are shuffled between tokens, in all layers alike (`DocumentShuffle`). A cell's p-value is
    the share of shuffles in which any cell of its group in any layer deviates as much: so a table of
    a hundred cells may be read cell by cell.

    Args:
        stack: The layers, and the examples of their tokens.
        groups: Classes of these tokens.
        document: <any integer>[num_examples] document of each example.
        num_permutations: Shuffles; the smallest p-value is 1 / (this + 1).
        seed: Seed of the shuffles.

    Returns:
        <float64>[C, E] for each group and layer, two-sided and corrected for all cells of all layers:
        by chance, any of them is at or below p with probability p. 1 in a class without tokens.

    Raises:
        DataError: When the documents are too few.

    Source:
        Westfall and Young, Resampling-Based Multiple Testing (1993): the maximum over cells.
    """
    shuffle = DocumentShuffle(stack.example, document[stack.example])
    columns = []
    for layer in stack.layers:
        first = layer.first.numpy().astype(np.int64)
        columns.append(
            np.where(first < 0, layer.facts.num_experts, first)
        )  # [N], the last for none

    # Tokens of the same classes are alike: patterns of classes are counted, not tokens.
    patterns = [_patterns(classes.members.numpy()) for classes in groups]

    # Tables of the tokens as they are, then of the shuffled ones.
    tables: list[list[list[Tensor]]] = [[[] for _ in stack.layers] for _ in groups]
    generator = np.random.default_rng(seed)
    for number in range(num_permutations + 1):
        source = shuffle.draw(generator) if number else slice(None)
        for index, layer in enumerate(stack.layers):
            column = columns[index][source]
            width = layer.facts.num_experts + 1
            for of_group, (distinct, row) in zip(tables, patterns, strict=True):
                cells = row * width + column
                counts = np.bincount(cells, minlength=len(distinct) * width).reshape(-1, width)
                of_group[index].append(torch.from_numpy(counts[:, :-1]))

    p_values = []
    for of_group, (distinct, _) in zip(tables, patterns, strict=True):
        p_values.append(_corrected(of_group, torch.from_numpy(distinct).double()))
    return p_values


def _patterns(members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sets of classes <bool>[P, C] that tokens have, and the set <int64>[N] of each token.

    Args:
        members: <bool>[C, N] which classes each token has.
    """
    number = np.zeros(members.shape[1], dtype=np.int64)
    first = number[:1]
    for is_member in members:
        # The sets are numbered anew with each class, so that the numbers stay small.
        _, first, number = np.unique(number * 2 + is_member, return_index=True, return_inverse=True)
    return members[:, first].T, number


def _corrected(tables: Sequence[Sequence[Tensor]], of_pattern: Tensor) -> list[Tensor]:
    """Returns p-values <float64>[C, E] for each layer, corrected for all cells.

    Args:
        tables: For each layer R tables <int64>[P, E] of patterns by experts, the actual one first.
        of_pattern: <float64>[P, C] which classes a pattern has.
    """
    # How far each cell deviates in each table.
    surprises = []
    for of_layer in tables:
        counts = einsum(of_pattern, torch.stack(list(of_layer)).double(), "p c, r p e -> r c e")
        surprises.append(_surprise(counts))  # [R, C, E]

    # The most surprising cell of each table, against which each actual cell is compared.
    most = torch.stack([surprise.amax(dim=(1, 2)) for surprise in surprises]).amax(dim=0)  # [R]
    ascending = most.sort().values
    p_values = []
    for surprise in surprises:
        below = torch.searchsorted(ascending, surprise[0].contiguous())
        p_values.append((len(ascending) - below).double() / len(ascending))
    return p_values


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
