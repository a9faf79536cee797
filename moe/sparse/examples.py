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
    if prefix_numbers is None:
        prefix_numbers = torch.zeros(base.shape[:2], device=base.device)

    allowed = [base]
    probs = [base.softmax(dim=-1)]  # without a prefix
    for number, part in enumerate(others, start=1):
        has_prefix = (prefix_numbers == number)[..., None]  # [G, S, 1]
        of_both = torch.cat([base, part], dim=-1).softmax(dim=-1)
        of_base, of_part = of_both.tensor_split([base.shape[-1]], dim=-1)
        allowed.append(part.where(has_prefix, lowest_logit(part)))
        probs[0] = of_base.where(has_prefix, probs[0])
        probs.append(of_part.where(has_prefix, 0.0))
    return RouterScores(torch.cat(allowed, dim=-1), torch.cat(probs, dim=-1))
