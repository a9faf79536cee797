"""Choices that an intervention is about: those of one expert, or as many at random.

Comes before `interventions`.
"""

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

from moe.sparse.plan import DispatchPlan

ChoiceMask = Callable[[DispatchPlan], Tensor]
"""A function of a plan that returns <bool>[G, S, K]: some of its accepted choices."""


def choices_of(expert: int) -> ChoiceMask:
    """Returns the function that finds the accepted choices of one expert."""

    def find(plan: DispatchPlan) -> Tensor:
        return plan.accepted & (plan.expert_index == expert)

    return find


def as_many_at_random(expert: int, *, num_sequences: int, seed: int) -> ChoiceMask:
    """Returns the function that draws as many accepted choices as an expert has, in each sequence.

    The draw is from the choices of all experts. One seed gives every expert of a layer the same
    lot, of which a larger expert takes more: so experts are compared to the same random tokens, and
    their numbers play no part.

    Args:
        expert: Number of the expert, from 0.
        num_sequences: Sequences of the batch that plans will be of, B.
        seed: Of the lot.
    """
    find = choices_of(expert)

    def by_sequence(x: Tensor) -> Tensor:
        return rearrange(x, "g s k -> (g s k)").unflatten(0, (num_sequences, -1))  # [B, L * K]

    def draw(plan: DispatchPlan) -> Tensor:
        accepted = by_sequence(plan.accepted)
        num_wanted = by_sequence(find(plan)).sum(dim=1, keepdim=True)  # [B, 1]

        # A place in line for each accepted choice; the others stand behind them.
        generator = torch.Generator().manual_seed(seed)
        lot = torch.rand(accepted.shape, generator=generator, dtype=torch.float64)
        lot = lot.to(accepted.device).masked_fill(~accepted, 2)
        place = lot.argsort(dim=1).argsort(dim=1)  # [B, L * K]
        return (place < num_wanted).view_as(plan.accepted)

    return draw
