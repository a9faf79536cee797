"""Matrix products on a CPU in float32, by the faster of torch's two libraries.

torch sends float32 products to its BLAS; which library is faster varies, see product_choice.py.
Both are exact to rounding. Small products keep torch's own library: a call of oneDNN costs 15 us
more.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.kernels.expert_rows import rounded_count
from moe.kernels.product_choice import ProductKind, is_onednn_chosen, products_in_use
from moe.kernels.stored_weight import StoredWeight
from moe.kernels.torch_private import is_plain, onednn_linear

_LEAST_WORK = 2**19  # rows x inputs x outputs
_DENSE_KINDS: tuple[ProductKind, ...] = ("forward", "input_gradient", "weight_gradient")


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x W^T, differentiably.

    Args:
        x: <any float>[..., I].
        weight: <any float>[O, I].

    Returns:
        <dtype of x>[..., O].
    """
    has_no_choice = isinstance(weight, StoredWeight) or x.dim() < 2
    if has_no_choice or torch.is_autocast_enabled("cpu") or not _has_choice(x, weight):
        return F.linear(x, weight)

    num_tokens = x.numel() // x.shape[-1]
    needs_graph = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    kinds = _DENSE_KINDS if needs_graph else ("forward",)
    if not any(is_onednn_chosen(kind, num_tokens) for kind in kinds):
        return F.linear(x, weight)

    rows = x.flatten(0, -2)
    if needs_graph:
        return _Linear.apply(rows, weight).unflatten(0, x.shape[:-1])
    return multiply_by_onednn(rows, weight).unflatten(0, x.shape[:-1])


def multiply_by_onednn(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x W^T <float>[N, O] of <float>[N, I], without a graph, for an N that often changes.

    oneDNN keeps memory for every number of rows, so requests of any length use only a few.
    """
    num_rows = x.shape[0]
    num_added = rounded_count(num_rows) - num_rows
    if not num_added:
        return onednn_linear(x, weight)
    return onednn_linear(F.pad(x, (0, 0, 0, num_added)), weight)[:num_rows]


def multiply(
    x: Tensor, weight: Tensor, kind: ProductKind = "expert_forward", out: Tensor | None = None
) -> Tensor:
    """Returns x W^T, without a graph.

    Args:
        x: <float>[N, I], of any strides.
        weight: <float>[O, I], of any strides.
        kind: Which product of a layer this is.
        out: <float>[N, O] to fill; None for a new one.

    Returns:
        <float>[N, O].
    """
    # The cheapest check comes first: decoding runs it for every product.
    is_float32 = x.dtype == torch.float32
    num_tokens = x.shape[1 if kind == "weight_gradient" else 0]
    if not is_float32 or not is_onednn_chosen(kind, num_tokens) or not _has_choice(x, weight):
        return torch.mm(x, weight.t(), out=out)

    product = onednn_linear(x, weight)
    return product if out is None else out.copy_(product)


def expert_weight_gradient(d_output: Tensor, x: Tensor, out: Tensor) -> None:
    """Computes dW = dy^T x of an expert.

    Args:
        d_output: <float>[N, O] dy.
        x: <float>[N, I].
        out: <float>[O, I] to fill.
    """
    d_output_t = d_output.t()
    if d_output.element_size() == 2 and products_in_use().copies_expert_gradient:
        d_output_t = d_output_t.contiguous()
    multiply(d_output_t, x.t(), kind="weight_gradient", out=out)


def prepares_for_row_counts(dtype: torch.dtype) -> bool:
    """Returns whether products of experts are slower for a number of rows that is new."""
    if not has_onednn():
        return False
    if dtype.itemsize == 2:
        return True
    kinds: tuple[ProductKind, ...] = ("expert_forward", "expert_input_gradient")
    return dtype == torch.float32 and any(is_onednn_chosen(kind, 2**10) for kind in kinds)


class _Linear(torch.autograd.Function):
    """`linear` of two matrices, each product by its library."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply(x, weight, "forward", x.shape[0])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (d_product,) = grad_outputs
        x, weight = ctx.saved_tensors
        num_tokens = x.shape[0]
        d_x = None
        d_weight = None

        # y = x W^T, so dx = dy W and dW = dy^T x.
        if ctx.needs_input_grad[0]:
            d_x = _multiply(d_product, weight.t(), "input_gradient", num_tokens)
        if ctx.needs_input_grad[1]:
            d_weight = _multiply(d_product.t(), x.t(), "weight_gradient", num_tokens)
        return d_x, d_weight


def _multiply(a: Tensor, b: Tensor, kind: ProductKind, num_tokens: int) -> Tensor:
    """Returns a b^T of two matrices; differentiably where gradients will have gradients."""
    if torch.is_grad_enabled() or not is_onednn_chosen(kind, num_tokens):
        return torch.mm(a, b.t())
    return onednn_linear(a, b)


def _has_choice(x: Tensor, weight: Tensor) -> bool:
    """Returns whether both libraries can do the product, and it is large enough to matter."""
    # Tracers, transforms and shards must see an operation that they know.
    return (
        is_plain(x, weight)
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.numel() * weight.shape[0] >= _LEAST_WORK
        and has_onednn()
    )


def has_onednn() -> bool:
    """Returns whether torch has oneDNN, and nobody switched it off."""
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
