"""Measures of tables of counts: what rows tell about columns.

Comes before specialization.py, coactivation.py and matching.py.
"""

import math

import torch
from torch import Tensor


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
