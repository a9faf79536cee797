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

from moe.kernels.torch_private import is_plain, onednn_linear

_LEAST_WORK = 2**19  # rows x inputs x outputs


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x W^T, differentiably.

    Args:
        x: <any float>[..., I].
        weight: <any float>[O, I].

    Returns:
        <dtype of x>[..., O].
    """
    # Tracers and transforms must see an operation that they know.
    needs_plain_product = torch.is_autocast_enabled("cpu") or not is_plain(x, weight)
    if x.dim() < 2 or needs_plain_product or not _onednn_is_faster(x, weight):
        return F.linear(x, weight)

    product = _Linear.apply(x.flatten(0, -2), weight)
    return product.unflatten(0, x.shape[:-1])


def multiply(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns x W^T, without a graph.

    Args:
        x: <float>[N, I], of any strides.
        weight: <float>[O, I], of any strides.
        out: <float>[N, O] to fill; None for a new one.

    Returns:
        <float>[N, O].
    """
    if not _onednn_is_faster(x, weight):
        return torch.mm(x, weight.t(), out=out)

    product = onednn_linear(x, weight)
    return product if out is None else out.copy_(product)


class _Linear(torch.autograd.Function):
    """`linear` of two matrices, with gradients by the same library."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn_linear(x, weight)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # named as what it is
        ctx: Any, d_product: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        d_x = None
        d_weight = None

        # y = x W^T, so dx = dy W and dW = dy^T x.
        if ctx.needs_input_grad[0]:
            d_x = linear(d_product, weight.t())
        if ctx.needs_input_grad[1]:
            d_weight = linear(d_product.t(), x.t())
        return d_x, d_weight


def _onednn_is_faster(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.numel() * weight.shape[0] >= _LEAST_WORK
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
    )
