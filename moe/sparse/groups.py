"""Tokens to groups and back: only tokens of one group compete for the slots of an expert.

Comes after inputs.py. After this, router.py gives every group its logits.
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def tokens_per_group(config: Any) -> int:
    """Returns the maximum number of tokens that a SparseConfig or STMoEConfig routes together.

    With 1 every sequence is a group of its own, since none fits.
    """
    return 1 if config.rules.capacity_scope == "sequence" else config.group_size


def sequences_per_group(batch: int, length: int, group_size: int) -> int:
    """Returns how many sequences are routed together.

    It is the largest divisor of `batch` whose tokens fit into `group_size`; a longer sequence is
    its own group. Groups of whole sequences keep routing independent of how a batch is split into
    micro-batches, as long as each micro-batch gives the same number here.

    Args:
        batch: Sequences in the batch, B.
        length: Tokens of a sequence with its padding, L.
        group_size: Maximum number of tokens in a group.

    Source:
        ST-MoE (arXiv:2202.08906) §7.2: groups of 4 sequences, mostly 2 to 8. Differs:
        Mesh-TensorFlow splits the flat token axis, and may split a sequence.
    """
    # The number that fits into a group, or the next smaller number that divides the batch.
    most_sequences = max(1, group_size // max(1, length))
    sequences = min(most_sequences, max(1, batch))
    while batch % sequences:
        sequences -= 1
    return sequences


def has_same_groups(lengths: Sequence[int], batch_size: int, rows: int, group_size: int) -> bool:
    """Returns whether a forward pass routes tokens in the same groups as the whole batch would.

    Args:
        lengths: Tokens of a sequence in the encoder and the decoder.
        batch_size: Sequences of the whole batch.
        rows: Sequences of a forward pass on one rank.
        group_size: Maximum number of tokens in a group; see `tokens_per_group`.
    """
    for length in lengths:
        whole = sequences_per_group(batch_size, length, group_size)
        if sequences_per_group(rows, length, group_size) != whole:
            return False
    return True


def common_num_groups(lengths: Sequence[int], batch_size: int, group_size: int) -> int:
    """Returns the maximum number of ranks that can share the groups of a batch evenly, in every
    stack.

    Args:
        lengths: Tokens of a sequence in the encoder and the decoder.
        batch_size: Sequences of the whole batch.
        group_size: Most tokens in a group; see `tokens_per_group`.
    """
    num_groups = [
        batch_size // sequences_per_group(batch_size, length, group_size) for length in lengths
    ]
    return math.gcd(*num_groups)


def to_groups(x: Tensor, sequences: int) -> Tensor:
    """Returns the tokens of each `sequences` neighbouring sequences side by side.

    Args:
        x: <any>[B, L, ...] values by token.
        sequences: Sequences in a group; divides B.

    Returns:
        <any>[G, S, ...] with G = B / sequences and S = sequences * L.
    """
    batch = x.shape[0]
    # A pattern of einops here, and one on the way back, would cost a decoding step as much as the
    # gate.
    length = x.shape[1]
    return x.reshape(batch // sequences, sequences * length, *x.shape[2:])


def from_groups(x: Tensor, sequences: int) -> Tensor:
    """Returns one row of tokens for each sequence again: the inverse of `to_groups`.

    Args:
        x: <any>[G, S, ...] values by token.
        sequences: Sequences in a group.

    Returns:
        <any>[B, L, ...].
    """
    num_groups, group_size = x.shape[:2]
    return x.reshape(num_groups * sequences, group_size // sequences, *x.shape[2:])
