"""Backward passes that raise when differentiated again.

torch's `once_differentiable` raises only if the incoming gradient has its own graph. The
sum of an output has none, and a penalty on its gradients would then silently be a constant.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def first_order_only(backward: F) -> F:
    """Decorates `backward` of a Function: differentiating its gradients raises an error."""

    @functools.wraps(backward)
    def refusing(ctx: Any, *d_outputs: Tensor) -> Any:
        with torch.no_grad():
            gradients = backward(ctx, *d_outputs)
        if not torch.is_grad_enabled():
            return gradients

        # create_graph=True: the gradients depend on what was saved, too.
        sources = [x for x in (*ctx.saved_tensors, *d_outputs) if x is not None]
        results = []
        for gradient in gradients:
            results.append(None if gradient is None else _Refuse.apply(gradient, *sources))
        return tuple(results)

    return cast(F, refusing)


class _Refuse(torch.autograd.Function):
    """Returns a gradient unchanged; its backward raises."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        raise RuntimeError(
            "The experts' kernels cannot compute gradients of gradients (create_graph=True). Build the sparse layer "
            'with dispatch="static", whose operations torch can differentiate twice.'
        )
