"""Alignment of experts: the order of hidden units in which one expert is most like another."""

import torch
from einops import einsum
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def aligned_units(up: Tensor, down: Tensor, other_up: Tensor, other_down: Tensor) -> Tensor:
    """Returns the order of an expert's hidden units that matches another expert best.

    The function of the expert does not depend on the order, but means of weights do.

    Args:
        up: <float32>[H, F, D] the projections to its F hidden units: gate and up, or up alone.
        down: <float32>[D, F] the projection of its hidden units.
        other_up: <float32>[H, F, D] the same of the expert to match.
        other_down: <float32>[D, F] likewise.

    Returns:
        <int64>[F]: `up[:, order]` and `down[:, order]` are the aligned weights.

    Source:
        M-SMoE (arXiv:2310.01334), UNITES-Lab/MC-SMoE at 4a195b1: linear assignment that maximises
        the inner product of all weights of matched units. Differs: no.
    """
    similarity = einsum(other_up, up, "h i d, h j d -> i j")  # [F, F]
    similarity += einsum(other_down, down, "d i, d j -> i j")
    _, order = linear_sum_assignment(similarity.cpu().numpy(), maximize=True)
    return torch.from_numpy(order).to(up.device)
