"""Matrix products of a CPU in float32, by the faster of torch's two libraries.

torch sends float32 products to MKL, which takes the slower half of an AMD core's instructions, and
one core for a single row; the other library in torch's builds, oneDNN, knows neither limit. Both
are exact to rounding. On a 4-core AMD EPYC, 4096 x 768 x 3072 takes 75 ms with MKL and 32 ms with
oneDNN, a single row 0.55 ms and 0.20 ms.

Small products stay where they are: a call of oneDNN costs 15 us more. So do gradients of the
weights of experts: oneDNN prepares itself for every new number of rows, for sums over them in twice
the time of the product.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_LEAST_WORK = 2**19  # rows x inputs x outputs


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x W^T <any float>[..., O], differentiably.

    Args:
        x: <any float>[..., I].
        weight: <any float>[O, I].
    """
    if (
        torch.compiler.is_compiling()
        or _is_watched()
        or x.dim() < 2
        or not _onednn_is_faster(x, weight)
    ):
        return F.linear(x, weight)
    return _Linear.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])


def multiply(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns x W^T <float>[N, O], without a graph.

    Args:
        x: <float>[N, I], of any strides.
        weight: <float>[O, I], of any strides.
        out: <float>[N, O] to fill; None for a new one.
    """
    if not _onednn_is_faster(x, weight):
        return torch.mm(x, weight.t(), out=out)
    product = _by_onednn(x, weight)
    return product if out is None else out.copy_(product)


class _Linear(torch.autograd.Function):
    """`linear` of two matrices, with gradients by the same library."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _by_onednn(x, weight)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # named as what it is
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = linear(grad, weight.t()) if ctx.needs_input_grad[0] else None
        return dx, linear(grad.t(), x.t()) if ctx.needs_input_grad[1] else None


def _is_watched() -> bool:
    """Returns whether autocast, the tracer or torch.func is on, which know the plain product alone."""
    functional = torch._C._functorch.maybe_current_level() is not None  # pyright: ignore[reportAttributeAccessIssue]
    return functional or torch.is_autocast_enabled("cpu") or torch._C._is_tracing()


def _onednn_is_faster(x: Tensor, weight: Tensor) -> bool:
    """Returns whether <any float>[..., I] times <any float>[O, I] is a product for oneDNN."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.numel() * weight.shape[0] >= _LEAST_WORK
        and type(x) in _PLAIN
        and type(weight) in _PLAIN
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
    )


_PLAIN = (Tensor, torch.nn.Parameter)  # no shard, no stand-in of a tracer


def _by_onednn(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x W^T <float32>[N, O] of <float32>[N, I] and <float32>[O, I]; the operation that
    torch.compile uses.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


if torch.backends.mkldnn.is_available():

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _count_flops(x: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
        """Returns the arithmetic of a product, for torch's FlopCounterMode."""
        return 2 * x.numel() * weight[0]
