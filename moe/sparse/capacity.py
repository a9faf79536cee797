"""The number of slots of an expert in a group, as exact integers."""

from fractions import Fraction
from typing import Literal

import torch

from moe.sparse.config import SparseConfig


def slots_of_expert(config: SparseConfig, num_tokens: int, *, training: bool) -> int | None:
    """Returns C, the slots of one expert in one group; None when no token is dropped.

    Experts of a prefix do not count, so that a model has the same slots with and without them.

    Args:
        config: Settings of the layer.
        num_tokens: Tokens of the group with its padding, S.
        training: Whether to use the capacity factor of training instead of evaluation's.
    """
    # A fixed number, at most one slot for each token.
    if config.expert_capacity is not None:
        return min(config.expert_capacity, num_tokens)

    # Or a share of the group, which may differ between training and evaluation.
    factor = config.capacity_factor if training else config.eval_capacity_factor
    if factor is None:
        return None
    return expert_capacity(
        num_tokens,
        config.num_base_experts,
        factor,
        config.min_expert_capacity,
        config.rules.capacity_rounding,
    )


def expert_capacity(
    num_tokens: int,
    num_experts: int,
    capacity_factor: float,
    min_expert_capacity: int,
    rounding: Literal["floor", "ceil", "round"] = "floor",
) -> int:
    """Returns C, the slots of one expert in one group.

    It does not depend on K: with two choices a token and a factor of 1.25, second choices are
    dropped first. The factor is read as the decimal number that was written, so that 100 tokens x
    0.29 are 29 slots, not 28.

    Args:
        num_tokens: Tokens of the group with its padding, S.
        num_experts: Experts, E.
        capacity_factor: Slots relative to an even share S / E.
        min_expert_capacity: Smallest result, for any group size.
        rounding: `floor` or `ceil`, then at most S; or `round` half to even, with no such bound.

    Source:
        Mesh-TensorFlow transformer/moe.py at a32810e: max(min(S, int(S * CF / E)), C_min).
        Flaxformer architectures/moe/routing.py at 399ea3a8: max(round(CF * S / E), C_min). fairseq
        modules/moe/top2gate.py: ceil(fraction * S), where the factor is fraction * E. Differs: no
        rounding error of binary fractions.
    """
    # S * CF / E as a fraction of integers: quotient and remainder.
    numerator, denominator = _written_ratio(capacity_factor)
    divisor = num_experts * denominator
    capacity = num_tokens * numerator // divisor
    remainder = num_tokens * numerator % divisor

    # Round half to even, as Python does; or down or up, and then to no more slots than tokens.
    if rounding == "round":
        is_half = 2 * remainder == divisor
        rounds_up = 2 * remainder > divisor or (is_half and capacity % 2 == 1)
        capacity += int(rounds_up)
    else:
        rounds_up = rounding == "ceil" and remainder > 0
        capacity = min(num_tokens, capacity + int(rounds_up))
    return max(capacity, min_expert_capacity)


@torch.compiler.assume_constant_result
def _written_ratio(factor: float) -> tuple[int, int]:
    """Returns the decimal number as a ratio of integers, which a compiled graph holds as a constant."""
    return Fraction(str(factor)).as_integer_ratio()
