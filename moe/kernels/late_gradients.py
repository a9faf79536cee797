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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe.kernels.expert_weights import ExpertWeights
from moe.kernels.first_order import first_order_only
from moe.kernels.torch_private import is_plain

ComputeGradients = Callable[[bool, bool], tuple[Tensor | None, Tensor | None]]
"""Takes whether dW1 and dW2 are needed, and returns those."""


class LateGradients:
    """Storage in which a backward pass leaves the gradients of the weights for later."""

    def __init__(self) -> None:
        self._compute: ComputeGradients | None = None

    def leave(self, compute: ComputeGradients, weights: ExpertWeights) -> tuple[Tensor, Tensor]:
        """Has the gradients computed later.

        Args:
            compute: Computes them.
            weights: Whose gradients they are.

        Returns:
            <float>[E, 2F or F, D] and [E, D, F] zeros that take no memory, as placeholders.
        """
        self._compute = compute
        first = weights.first.new_zeros(()).expand(weights.first.shape)
        down = weights.down.new_zeros(()).expand(weights.down.shape)
        return first, down

    def compute(self, needs_first: bool, needs_down: bool) -> tuple[Tensor | None, Tensor | None]:
        """Returns the gradients of W1 and W2, and releases their inputs."""
        assert self._compute is not None, "the experts' own node runs first"
        compute = self._compute
        self._compute = None
        return compute(needs_first, needs_down)


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
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # by the decorator
        ctx: Any, *_: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        needs_first, needs_down, _ = ctx.needs_input_grad
        return (*ctx.late.compute(needs_first, needs_down), None)
