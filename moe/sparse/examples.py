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
    if segment_ids is None:
        return token_mask & (token_mask.cumsum(dim=1) == 1)
    segment_before = F.pad(segment_ids[:, :-1], (1, 0))  # [B, L]
    return (segment_ids != segment_before) & (segment_ids != 0)


def of_first_token(values: Tensor, starts: Tensor) -> Tensor:
    """Returns for each token the values <any>[G, S, ...] of the first token of its example.

    Args:
        values: <any>[G, S, N] values by token.
        starts: <bool>[G, S] first tokens.
    """
    position = torch.arange(starts.shape[1], device=starts.device)
    first = position.where(starts, 0).cummax(dim=1).values  # [G, S]
    return values.gather(1, first[..., None].expand_as(values))


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
    floor = lowest_logit(logits[0])
    sizes = [part.shape[-1] for part in logits]
    base = logits[0]
    num_base, num_experts = sizes[0], sum(sizes)

    # Without a prefix: the base experts alone.
    num_others = num_experts - num_base
    probs = F.pad(base.softmax(dim=-1), (0, num_others))  # [G, S, E]
    allowed = F.pad(base, (0, num_others), value=floor)
    if prefix_numbers is None:
        return RouterScores(allowed, probs)

    # With one: its experts, too, in their places.
    before = num_base
    for number, part in enumerate(logits[1:], start=1):
        after = num_experts - before - sizes[number]
        gap = (before - num_base, after)
        has_prefix = (prefix_numbers == number)[..., None]  # [G, S, 1]
        base_probs, part_probs = (
            torch.cat([base, part], dim=-1).softmax(dim=-1).split([num_base, sizes[number]], dim=-1)
        )
        widened = torch.cat([base_probs, F.pad(part_probs, gap)], dim=-1)  # [G, S, E]
        probs = widened.where(has_prefix, probs)
        widened = torch.cat([base, F.pad(part, gap, value=floor)], dim=-1)
        allowed = widened.where(has_prefix, allowed)
        before += sizes[number]
    return RouterScores(allowed, probs)
