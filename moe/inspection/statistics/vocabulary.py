"""Vocabulary specialisation: how strongly experts prefer single token ids.

Comes after specialization.py, which does the same for classes of tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moe.checks import check_integer
from moe.errors import DataError
from moe.inspection.statistics.permutations import (
    DocumentShuffle,
    Shuffle,
    TokenPlaces,
    check_permutations,
    check_tokens,
    share_at_least,
    shuffled_tables,
)
from moe.inspection.statistics.token_classes import token_ids
from moe.sparse.editing import LayerKey
from moe.tracing.trace import LayerTrace, StackTrace

MIN_OCCURRENCES = 10
"""Token ids with fewer occurrences are left out, as in OLMoE (arXiv:2409.02060)."""

_SMOOTHING = 0.5
"""Dirichlet(1/2) prior: pseudo-occurrences of an id for each expert, times its load times E."""


class VocabularyTable(NamedTuple):
    """The token ids of a stack that occur often enough, by experts of one layer.

    Attributes:
        layer: Its stack and number.
        tokens: `input` or `target`: which token of a position is counted.
        ids: <int64>[X] token ids, by falling number of occurrences.
        seen: <int64>[X] number of occurrences of each with an expert.
        counts: <int64>[X, E] how often each chose an expert first.
        share: <float64>[X, E] counts over seen.
        lift: <float64>[X, E] share over the expert's share of all tokens, smoothed: as if each id
            had been seen E / 2 times more, routed as all tokens are.
        score: Specialisation of the layer: mean over ids of the largest share.
        chance: Mean of the score over shuffles; it is above 1 / E.
        p_value: Share of shuffles with as large a score.
    """

    layer: LayerKey
    tokens: str
    ids: Tensor
    seen: Tensor
    counts: Tensor
    share: Tensor
    lift: Tensor
    score: float
    chance: float
    p_value: float


def vocabulary_table(
    stack: StackTrace,
    layer: LayerTrace,
    places: TokenPlaces,
    *,
    tokens: str = "input",
    min_occurrences: int = MIN_OCCURRENCES,
    null: type[Shuffle] = DocumentShuffle,
    num_permutations: int = 99,
    seed: int = 0,
) -> VocabularyTable:
    """Returns token ids by experts, and how specialised the layer is in them.

    Args:
        stack: The stack's part of a trace.
        layer: One of its layers.
        places: Positions of the tokens, see `token_places`.
        tokens: `input`, or for the decoder `target`: the label at each position.
        min_occurrences: Rarer ids are left out; a smaller value gives more rows, and more by chance.
        null: Null hypothesis; see `moe.inspection.statistics.permutations`.
        num_permutations: Shuffles.
        seed: Seed of the shuffles.

    Raises:
        ConfigError: When an option is out of range, or the encoder's targets are requested.
        DataError: When no id occurs often enough, or layer and places belong to different tokens.

    Source:
        OLMoE (arXiv:2409.02060) eq. 8, k = 1. Differs: choices are counted before capacity.
    """
    check_permutations(num_permutations, seed)
    check_integer("min_occurrences", min_occurrences, least=1)
    ids = token_ids(stack, tokens)
    check_tokens("The ids", len(ids), len(layer.first))
    check_tokens("The places", len(places.position), len(layer.first))

    # Frequent ids are rows, in the order of their frequency; a last row takes all others.
    occurrences = torch.bincount(ids[layer.first >= 0])
    order = occurrences.argsort(descending=True, stable=True)
    frequent = order[occurrences[order] >= min_occurrences]  # [X]
    if not len(frequent):
        most = int(occurrences.max()) if len(occurrences) else 0
        raise DataError(
            f"No token id of the {layer.facts.stack} occurs {min_occurrences} times: the most frequent one occurs "
            f"{most} times. Trace more text, or set min_occurrences lower."
        )
    num_rows = len(frequent) + 1
    row_of = torch.full((int(ids.max()) + 1,), len(frequent))
    row_of[frequent] = torch.arange(len(frequent))
    rows = row_of[ids].numpy()  # [N]

    # The table as it is comes first, shuffles follow.
    shuffle = null(places)
    draws = shuffled_tables(rows, num_rows, [layer], shuffle, num_permutations, seed)
    (table,) = next(draws)
    scores = [_score(table[:-1])]
    for (shuffled,) in draws:
        scores.append(_score(shuffled[:-1]))
    statistics = torch.tensor(scores, dtype=torch.float64).round(decimals=12)

    # Shares of the ids, next to the load of all tokens.
    counts = table[:-1]  # [X, E]
    load = table.sum(dim=0).double() / table.sum()
    return VocabularyTable(
        layer=layer.key,
        tokens=tokens,
        ids=frequent,
        seen=counts.sum(dim=1),
        counts=counts,
        share=counts.double() / counts.sum(dim=1, keepdim=True),
        lift=_smoothed_lift(counts, load),
        score=scores[0],
        chance=float(statistics[1:].mean()),
        p_value=float(share_at_least(statistics, statistics[:1])),
    )


def _score(counts: Tensor) -> float:
    """Returns the mean of the largest shares in rows of <int64>[X, E]; shuffled rows may be empty."""
    seen = counts.sum(dim=1)
    share = counts.amax(dim=1).double() / seen.clamp(min=1)
    return float(share[seen > 0].mean())


def _smoothed_lift(counts: Tensor, load: Tensor) -> Tensor:
    """Returns <float64>[X, E]: share over load <float64>[E], both of <int64>[X, E] and a prior."""
    # A prior that is routed like all tokens.
    prior = _SMOOTHING * len(load)
    seen = counts.sum(dim=1, keepdim=True)
    share = (counts + prior * load) / (seen + prior)
    return share / load
