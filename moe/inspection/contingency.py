"""Measures of tables of counts: intervals of shares, and what rows tell about columns.

Comes before specialization.py, coactivation.py and matching.py.
"""

import math

import torch
from torch import Tensor


def wilson_interval(counts: Tensor, tokens: Tensor, confidence: float) -> tuple[Tensor, Tensor]:
    """Returns the ends, <float64>[...] each, of Wilson's score interval of a share.

    Args:
        counts: <any>[...] how often.
        tokens: <any>[...] of how many; NaN is returned where that is 0.
        confidence: Share of intervals that hold the truth.
    """
    quantile = torch.tensor((1 + confidence) / 2, dtype=torch.float64)
    z = float(torch.special.ndtri(quantile))
    n = tokens.double()
    share = counts.double() / n
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    spread = (share * (1 - share) / n + (z / (2 * n)) ** 2).sqrt()
    half = z / (1 + z**2 / n) * spread
    return (centre - half).clamp(min=0), (centre + half).clamp(max=1)


def normalized_information(counts: Tensor) -> Tensor:
    """Returns <float64>[...]: the share of the entropy of rows that the columns tell, I / H(row).

    NaN where one row holds all counts, or there are none.

    Args:
        counts: <any>[..., C, E] how often each row met each column.
    """
    information = mutual_information(counts)
    joint = counts.double()
    rows = joint.sum(dim=-1) / joint.sum(dim=(-2, -1))[..., None]
    entropy = torch.special.entr(rows).sum(dim=-1)
    return torch.where(entropy > 1e-12, information / entropy, math.nan)


def mutual_information(counts: Tensor) -> Tensor:
    """Returns <float64>[...]: the mutual information in nats of rows and columns <any>[..., C, E]."""
    joint = counts.double()
    joint = joint / joint.sum(dim=(-2, -1), keepdim=True)
    rows = torch.special.entr(joint.sum(dim=-1)).sum(dim=-1)
    columns = torch.special.entr(joint.sum(dim=-2)).sum(dim=-1)
    return (rows + columns - torch.special.entr(joint).sum(dim=(-2, -1))).clamp(min=0)
