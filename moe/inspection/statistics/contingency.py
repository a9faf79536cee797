"""Tables of counts, and how much their rows predict their columns.

Comes before specialization.py and matching.py.
"""

import math

import torch
from torch import Tensor

from moe.errors import DataError

_NO_ENTROPY = 1e-12  # of rows that differ by rounding alone


def one_hot_choices(choices: Tensor, num_experts: int) -> Tensor:
    """Returns <float64>[N, E]: 1 where a token chose an expert.

    Args:
        choices: <any integer>[N] or [N, K] expert of each choice, -1 for none.
        num_experts: E.

    Raises:
        DataError: When an expert is out of range.
    """
    # One choice is K = 1.
    choices = choices.long()
    if choices.ndim == 1:
        choices = choices[:, None]  # [N, K]
    if choices.numel() and not -1 <= int(choices.min()) <= int(choices.max()) < num_experts:
        raise DataError(
            f"The choices have experts from {int(choices.min())} to {int(choices.max())}; expected -1 for none, or 0 "
            f"to {num_experts - 1}."
        )

    # The last column means no choice.
    column = choices.masked_fill(choices < 0, num_experts)
    chosen = torch.zeros(len(choices), num_experts + 1, dtype=torch.float64)
    return chosen.scatter(1, column, 1)[:, :num_experts]


def normalized_information(counts: Tensor) -> Tensor:
    """Returns <float64>[...]: the share of the entropy of rows that the columns tell, I / H(row).

    NaN where one row holds all counts, or there are none.

    Args:
        counts: <any>[..., C, E] how often each row met each column.
    """
    # Entropy of the classes, the maximum.
    joint = _shares(counts)
    rows = joint.sum(dim=-1)
    entropy = _entropy(rows, dim=-1)

    # Mutual information.
    information = mutual_information(counts)
    return torch.where(entropy > _NO_ENTROPY, information / entropy, math.nan)


def mutual_information(counts: Tensor) -> Tensor:
    """Returns <float64>[...]: the mutual information in nats of rows and columns <any>[..., C, E]."""
    # I = H(row) + H(column) - H(row, column).
    joint = _shares(counts)
    of_rows = _entropy(joint.sum(dim=-1), dim=-1)
    of_columns = _entropy(joint.sum(dim=-2), dim=-1)
    of_both = _entropy(joint, dim=(-2, -1))
    return (of_rows + of_columns - of_both).clamp(min=0)


def _shares(counts: Tensor) -> Tensor:
    counts = counts.double()
    return counts / counts.sum(dim=(-2, -1), keepdim=True)


def _entropy(shares: Tensor, dim: int | tuple[int, int]) -> Tensor:
    return torch.special.entr(shares).sum(dim=dim)
