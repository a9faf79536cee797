"""Examples: tokens of one text, for which a router decides something once.

Comes after groups.py, which puts examples side by side; router.py and routers/pools.py read it.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.sparse.plan import RouterScores


def example_starts(token_mask: Tensor, segment_ids: Tensor | None = None) -> Tensor:
    """Returns which tokens <bool>[B, L] are the first of an example.

    Args:
        token_mask: <bool>[B, L] real tokens.
        segment_ids: <int64>[B, L] example of each token, 0 for padding; None when each sequence is
            one example.
    """
    # Examples end where the number of the last real token changes.
    segments = token_mask.long() if segment_ids is None else segment_ids * token_mask  # [B, L]
    is_real = segments != 0
    last = of_first_token(segments, is_real)
    return is_real & (segments != F.pad(last[:, :-1], (1, 0)))


def of_first_token(values: Tensor, starts: Tensor) -> Tensor:
    """Returns for each token the values of the first token of its example: of the last start up to it.

    Args:
        values: <any>[G, S, ...] values by token.
        starts: <bool>[G, S] first tokens.

    Returns:
        <any>[G, S, ...]; before the first start, values of the first position.
    """
    num_groups, group_size = starts.shape
    position = torch.arange(group_size, device=starts.device)
    first = position.where(starts, 0).cummax(dim=1).values  # [G, S]
    group = torch.arange(num_groups, device=starts.device)[:, None]  # [G, 1]
    return values[group, first]


def lowest_logit(logits: Tensor) -> float:
    """Returns the logit of an expert that a token may not use: the lowest number, as sums need finite ones."""
    return torch.finfo(logits.dtype).min


def prefix_scores(logits: Sequence[Tensor], prefix_numbers: Tensor | None) -> RouterScores:
    """Returns scores in which a token has the base experts and those of its example's prefix.

    Each softmax is over those experts alone, so that the scores of a token are bit-identical to
    those of a model without the other experts.

    Args:
        logits: <float32>[G, S, N] of the base experts, then of the experts of each prefix.
        prefix_numbers: <int64>[G, S] 0 for no prefix, else its number from 1; None for none.

    Returns:
        <float32>[G, S, E] of each kind; a probability of 0 for experts that a token may not use.
    """
    base, *others = logits
    floor = lowest_logit(base)
    num_base = base.shape[-1]
    num_experts = num_base + sum(part.shape[-1] for part in others)

    def widened(values: Tensor, first: int, rest: float) -> Tensor:
        """Returns [G, S, E] of values of the base experts and of those from `first` on."""
        own, part = values[..., :num_base], values[..., num_base:]
        gap = (first - num_base, num_experts - first - part.shape[-1])
        return torch.cat([own, F.pad(part, gap, value=rest)], dim=-1)

    # Without a prefix: the base experts alone.
    allowed = widened(base, num_base, floor)
    probs = widened(base.softmax(dim=-1), num_base, 0.0)
    if prefix_numbers is None:
        return RouterScores(allowed, probs)

    # With one: its experts, too, in their places.
    first = num_base
    for number, part in enumerate(others, start=1):
        has_prefix = (prefix_numbers == number)[..., None]  # [G, S, 1]
        both = torch.cat([base, part], dim=-1)
        allowed = widened(both, first, floor).where(has_prefix, allowed)
        probs = widened(both.softmax(dim=-1), first, 0.0).where(has_prefix, probs)
        first += part.shape[-1]
    return RouterScores(allowed, probs)
