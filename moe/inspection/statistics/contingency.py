"""Tables of counts: how much their rows tell about their columns. Comes before matching.py."""

import math

import torch
from torch import Tensor


def mutual_information(counts: Tensor) -> Tensor:
    """Returns <float64>[...]: the mutual information in nats of rows and columns <any>[..., C, E]."""
    # I = H(row) + H(column) - H(row, column).
    counts = counts.double()
    joint = counts / counts.sum(dim=(-2, -1), keepdim=True)
    of_rows = torch.special.entr(joint.sum(dim=-1)).sum(dim=-1)
    of_columns = torch.special.entr(joint.sum(dim=-2)).sum(dim=-1)
    of_both = torch.special.entr(joint).sum(dim=(-2, -1))
    return (of_rows + of_columns - of_both).clamp(min=0)


def adjusted_rand(counts: Tensor) -> float:
    """Returns the agreement of two groupings of tokens beyond chance: 0 by chance, 1 for the same.

    Args:
        counts: <int64>[E, E'] tokens by their groups in both.

    Returns:
        1 where both put all tokens into one group, or each into its own; NaN without tokens.

    Source:
        Hubert and Arabie, Comparing partitions (1985).
    """
    num_tokens = int(counts.sum())
    if not num_tokens:
        return math.nan

    # Pairs of tokens that are together in both, and in each.
    together = _pairs(counts)
    in_a = _pairs(counts.sum(dim=1))
    in_b = _pairs(counts.sum(dim=0))
    pairs = num_tokens * (num_tokens - 1) / 2
    expected = in_a * in_b / pairs if pairs else 0.0
    most = (in_a + in_b) / 2
    return 1.0 if most == expected else (together - expected) / (most - expected)


def _pairs(counts: Tensor) -> float:
    counts = counts.double()
    return float((counts * (counts - 1) / 2).sum())
