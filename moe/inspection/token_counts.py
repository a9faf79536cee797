"""How often which token goes to which expert: the counts of a trace."""

from typing import NamedTuple

import torch
from torch import Tensor

from moe.sparse.editing import LayerKey
from moe.sparse.stats import RouterStats
from moe.tracing.trace import LayerTrace, Trace


class LayerCounts(NamedTuple):
    """What one sparse layer's router did, by token id.

    Attributes:
        key: The layer: its stack, and its number there from 0.
        first_choice: <int64>[V, E] how often a token id had an expert as its first choice.
        accepted: <int64>[V, E] how often a token id got a slot of an expert, over all choices.
        stats: Summed statistics.
    """

    key: LayerKey
    first_choice: Tensor
    accepted: Tensor
    stats: RouterStats


RoutingCounts = tuple[LayerCounts, ...]
"""One LayerCounts for each sparse layer, the encoder's first."""


def count_tokens(trace: Trace, vocab_size: int) -> RoutingCounts:
    """Returns the counts of all tokens of a trace; of the decoder's, those that it reads.

    Source:
        ST-MoE (arXiv:2202.08906) §7: tokens by expert and layer.
    """
    # Layers of one stack count the same tokens.
    counts = []
    for layer in trace.layers:
        ids = trace.stack(layer.facts.stack).ids
        counts.append(_count_layer(layer, ids.long(), vocab_size))
    return tuple(counts)


def _count_layer(layer: LayerTrace, ids: Tensor, vocab_size: int) -> LayerCounts:
    """Returns the counts of one layer; ids are <int64>[N]."""
    num_experts = layer.facts.num_experts
    first = layer.first.long()  # [N]
    has_first = first >= 0

    # The cell of the table [V, E] that a choice of a token counts in.
    row = ids * num_experts  # [N]
    accepted_cell = (row[:, None] + layer.expert)[layer.accepted]
    first_cell = (row + first)[has_first]
    return LayerCounts(
        key=layer.key,
        first_choice=_count(first_cell, vocab_size, num_experts),
        accepted=_count(accepted_cell, vocab_size, num_experts),
        stats=layer.stats,
    )


def _count(cells: Tensor, vocab_size: int, num_experts: int) -> Tensor:
    """Returns <int64>[V, E]: how often each cell stands in <int64>[N]."""
    counts = torch.bincount(cells, minlength=vocab_size * num_experts)
    return counts.view(vocab_size, num_experts)
