"""How many slots an expert has in a group: integers only."""

import math
from fractions import Fraction


def expert_capacity(num_tokens: int, num_experts: int, capacity_factor: float, min_expert_capacity: int) -> int:
    """Returns C, the slots of one expert in one group.

    It does not depend on K: with two choices a token and a factor of 1.25, second choices are squeezed out first.
    The factor is read as the decimal number that was written, so that 100 tokens x 0.29 are 29 slots, not 28.

    Args:
        num_tokens: Tokens of the group with its padding, S.
        num_experts: E.
        capacity_factor: Slots relative to an even share S / E.
        min_expert_capacity: Least result, whatever the group.

    Source:
        Mesh-TensorFlow transformer/moe.py at a32810e: max(min(S, int(S * CF / E)), C_min). Differs: no rounding
        error of binary fractions.
    """
    even_share = Fraction(num_tokens, num_experts) * Fraction(str(capacity_factor))
    return max(min(num_tokens, math.floor(even_share)), min_expert_capacity)
