"""Products of rows with the weights of their experts, all experts in one call.

Rows are sorted by expert, without padding. The path of devices
other than a CPU, which has cpu_experts.py.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from moe.kernels.expert_weights import LowRank, expert_weight, is_quantized
from moe.kernels.first_order import first_order_only


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Returns x W_e^T for rows sorted by expert.

    One grouped product where torch has it: bfloat16, float16 and float32 with rows of a multiple of
    16 bytes; else one product for each expert.

    Args:
        x: <float>[N, I] rows.
        weight: <float>[E, O, I]; a quantized one is unpacked one expert at a time.
        counts: <int64>[E] rows of each expert. Later rows are never read, and their results are
            undefined.

    Returns:
        <float>[N, O].
    """
    ends = counts.cumsum(0, dtype=torch.int32)  # where the rows of each expert end
    is_compiling = torch.compiler.is_compiling() or x.is_meta
    is_one_call = _is_one_call(x, weight)

    # torch traces grouped products of bfloat16 alone; others are an operation of ours in a graph.
    if is_compiling and not (is_one_call and x.dtype == torch.bfloat16):
        return _grouped_linear_op(x, weight, ends)
    return _GroupedLinear.apply(x, weight, ends)


def grouped_low_rank(x: Tensor, adapter: LowRank, counts: Tensor) -> Tensor:
    """Returns what an adapter adds to the product of rows sorted by expert, as `grouped_linear`.

    Args:
        x: <float>[N, I] rows.
        adapter: The adapter.
        counts: <int64>[E] rows of each expert.

    Returns:
        <float>[N, O].
    """
    # With zeros up to a multiple of 16 bytes any rank is one call.
    zeros = (0, 0, 0, -adapter.scale.numel() % 8)
    a = F.pad(adapter.a * adapter.scale[:, None], zeros)
    b = F.pad(adapter.b, zeros).contiguous()
    return grouped_linear(grouped_linear(x, a, counts), b.mT, counts)


def _is_one_call(x: Tensor, weight: Tensor) -> bool:
    """Returns whether torch has one product for all experts: the device reads rows in whole words."""
    row_bytes = [size * x.element_size() for size in weight.shape[1:]]
    is_aligned = all(num_bytes % 16 == 0 for num_bytes in row_bytes)
    return x.dtype != torch.float64 and is_aligned and not is_quantized(weight)


def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Returns y <float>[N, O] = x W^T, within each expert."""
    if _is_one_call(x, weight):
        return F.grouped_mm(x, rearrange(weight, "e o i -> e i o"), offs=ends)
    return _loop(x, weight, ends, transposes=True)


def _loop(x: Tensor, weight: Tensor, ends: Tensor, *, transposes: bool) -> Tensor:
    """Returns x W^T or x W of one expert after the other, which waits for the ends."""
    products = []
    *rows_by_expert, rest = _split_rows(x, ends)
    for expert, rows in enumerate(rows_by_expert):
        matrix = expert_weight(weight, expert, x)
        products.append(torch.mm(rows, matrix.t() if transposes else matrix))
    num_outputs = weight.shape[1 if transposes else 2]
    return torch.cat([*products, rest.new_zeros(rest.shape[0], num_outputs)])


def _split_rows(x: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    """Returns the rows <float>[n, I] of each expert, and the unused rows after them."""
    return x.split(np.diff(ends.tolist(), prepend=0, append=x.shape[0]).tolist())


def _input_gradient(d_product: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Returns dx <float>[N, I] = dy W of y = x W^T, within each expert."""
    if _is_one_call(d_product, weight) and d_product.shape[0]:
        return F.grouped_mm(d_product, weight, offs=ends)
    return _loop(d_product, weight, ends, transposes=False)


def _weight_gradient(d_product: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Returns dW <float>[E, O, I] = dy^T x of y = x W^T, within each expert."""
    if not x.shape[0]:
        return torch.zeros_like(weight)
    if _is_one_call(x, weight):
        return F.grouped_mm(rearrange(d_product, "n o -> o n"), x, offs=ends)

    d_weights = []
    *d_product_by_expert, _ = _split_rows(d_product, ends)
    *rows_by_expert, _ = _split_rows(x, ends)
    for d_rows, rows in zip(d_product_by_expert, rows_by_expert, strict=True):
        d_weights.append(d_rows.t() @ rows)
    return torch.stack(d_weights)


class _GroupedLinear(torch.autograd.Function):
    """The products, whose backward accepts gradients of any strides, which that of torch's refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _product(x, weight, ends)

    @staticmethod
    @first_order_only
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # by the decorator
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        return _gradients(ctx, grad_outputs[0], _input_gradient, _weight_gradient)


def _gradients(
    ctx: Any, d_product: Tensor, input_gradient: Any, weight_gradient: Any
) -> tuple[Tensor | None, Tensor | None, None]:
    """Returns those of dx and dW that are needed; frozen experts need no dW."""
    x, weight, ends = ctx.saved_tensors
    d_product = d_product.contiguous()
    needs_x, needs_weight, _ = ctx.needs_input_grad
    d_x = input_gradient(d_product, weight, ends) if needs_x else None
    d_weight = weight_gradient(d_product, x, weight, ends) if needs_weight else None
    return d_x, d_weight, None


# ---- in compiled graphs ----


@torch.library.custom_op("moe::grouped_linear", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _grouped_linear_op(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return _product(x, weight, ends)


@_grouped_linear_op.register_fake
def _fake_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op(
    "moe::grouped_linear_input_gradient", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def _input_gradient_op(d_product: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return _input_gradient(d_product, weight, ends)


@_input_gradient_op.register_fake
def _fake_input_gradient(d_product: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return d_product.new_empty(d_product.shape[0], weight.shape[2])


@torch.library.custom_op(
    "moe::grouped_linear_weight_gradient", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def _weight_gradient_op(d_product: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return _weight_gradient(d_product, x, weight, ends)


@_weight_gradient_op.register_fake
def _fake_weight_gradient(d_product: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch.empty_like(weight)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, d_product: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    return _gradients(ctx, d_product, _input_gradient_op, _weight_gradient_op)


_grouped_linear_op.register_autograd(_backward, setup_context=_save_for_backward)
