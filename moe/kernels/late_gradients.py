"""Computes gradients of experts' weights while the gradients of rows are exchanged.

If rows came from other ranks, those ranks wait for the gradients of their rows; no rank waits for
gradients of weights. Of all ready nodes, a backward pass runs the one that the forward pass created
last. So the weights go through a node that is made between sending the rows and waiting for them,
and computes their gradients in its turn:

    forward    send rows     weights         wait for rows     experts
    backward   wait for dx   dW1 and dW2     send dx           dx

The experts store the inputs of the gradients there (cpu_experts.py), and give the node a
placeholder gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe.kernels.expert_weights import ExpertWeights
from moe.kernels.first_order import first_order_only
from moe.kernels.torch_private import is_plain


class LateGradients:
    """Where a backward pass leaves the gradients of the weights for later.

    Attributes:
        compute: Takes whether dW1 and dW2 are needed, and returns those.
    """

    compute: Callable[[bool, bool], Sequence[Tensor | None]] | None = None


def pass_weights(weights: ExpertWeights) -> tuple[ExpertWeights, LateGradients | None]:
    """Returns the weights through a node that computes their gradients when it runs.

    Call it after rows were sent, and before they are waited for.

    Args:
        weights: The experts' weights.

    Returns:
        The weights, and where the experts leave their gradients; None if that has no benefit.
    """
    first, down, *_ = weights
    needs_gradients = first.requires_grad or down.requires_grad
    if not (torch.is_grad_enabled() and needs_gradients and is_plain(first, down)):
        return weights, None

    late = LateGradients()
    first, down = _PassWeights.apply(first, down, late)
    return weights._replace(first=first, down=down), late


class _PassWeights(torch.autograd.Function):
    """Returns the weights as they are; the backward pass computes the gradients left for it."""

    @staticmethod
    def forward(
        ctx: Any, first: Tensor, down: Tensor, late: LateGradients
    ) -> tuple[Tensor, Tensor]:
        ctx.late = late
        return first.view_as(first), down.view_as(down)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        compute = ctx.late.compute
        assert compute is not None, "the experts' own node runs first"
        ctx.late.compute = None  # with it go the inputs of the gradients
        needs_first, needs_down, _ = ctx.needs_input_grad
        return (*compute(needs_first, needs_down), None)
