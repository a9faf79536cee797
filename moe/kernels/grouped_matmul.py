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


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Returns x W_e^T for rows sorted by expert.

    One grouped product where torch has it: bfloat16, float16 and float32 with rows of a multiple of
    16 bytes; else one product for each expert.

    Args:
        x: <float>[N, I] rows.
        weight: <float>[E, O, I]; a quantized one is unpacked one expert at a time.
        ends: <int32>[E] where the rows of each expert end. Later rows are never read, and their
            results are undefined.

    Returns:
        <float>[N, O].
    """
    return _GroupedLinear.apply(x, weight, ends)


def grouped_low_rank(x: Tensor, adapter: LowRank, ends: Tensor) -> Tensor:
    """Returns what an adapter adds to the product of rows sorted by expert, as `grouped_linear`.

    Args:
        x: <float>[N, I] rows.
        adapter: The adapter.
        ends: <int32>[E] where the rows of each expert end.

    Returns:
        <float>[N, O].
    """
    # With zeros up to a multiple of 16 bytes any rank is one call.
    zeros = (0, 0, 0, -adapter.scale.numel() % 8)
    a = F.pad(adapter.a * adapter.scale[:, None], zeros)
    b = F.pad(adapter.b, zeros).contiguous()
    return grouped_linear(grouped_linear(x, a, ends), b.mT, ends)


class _GroupedLinear(torch.autograd.Function):
    """The products, whose backward accepts gradients of any strides, which that of torch's refuses.

    Frozen experts need no gradient of their weights.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _product(x, weight, ends, True)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        d_product = grad_outputs[0].contiguous()
        needs_x, needs_weight, _ = ctx.needs_input_grad

        # y = x W^T, so dx = dy W and dW = dy^T x.
        d_x = _product(d_product, weight, ends, False) if needs_x else None
        d_weight = _weight_gradient(d_product, x, weight, ends) if needs_weight else None
        return d_x, d_weight, None


def _product(x: Tensor, weight: Tensor, ends: Tensor, transposes: bool) -> Tensor:
    """Returns x W^T <float>[N, O] or x W <float>[N, I], within each expert."""
    if _needs_operation(x, weight):
        return _product_op(x, weight, ends, transposes)
    if _is_one_call(x, weight):
        matrices = rearrange(weight, "e o i -> e i o") if transposes else weight
        return F.grouped_mm(x, matrices, offs=ends)

    # One expert after the other, which waits for the ends.
    products = []
    *rows_by_expert, rest = _split_rows(x, ends)
    for expert, rows in enumerate(rows_by_expert):
        matrix = expert_weight(weight, expert, x)
        products.append(torch.mm(rows, matrix.t() if transposes else matrix))
    num_outputs = weight.shape[1 if transposes else 2]
    return torch.cat([*products, rest.new_zeros(rest.shape[0], num_outputs)])


def _weight_gradient(d_product: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Returns dW <float>[E, O, I] = dy^T x of y = x W^T, within each expert."""
    if _needs_operation(x, weight):
        return _weight_gradient_op(d_product, x, weight, ends)
    if _is_one_call(x, weight):
        return F.grouped_mm(rearrange(d_product, "n o -> o n"), x, offs=ends)

    d_weights = []
    *d_product_by_expert, _ = _split_rows(d_product, ends)
    *rows_by_expert, _ = _split_rows(x, ends)
    for d_rows, rows in zip(d_product_by_expert, rows_by_expert, strict=True):
        d_weights.append(d_rows.t() @ rows)
    return torch.stack(d_weights)


def _is_one_call(x: Tensor, weight: Tensor) -> bool:
    """Returns whether torch has one product for all experts: the device reads rows in whole words."""
    is_aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    is_supported = x.dtype != torch.float64 and not is_quantized(weight)
    return is_supported and is_aligned and x.shape[0] > 0


def _split_rows(x: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    """Returns the rows <float>[n, I] of each expert, and the unused rows after them."""
    return x.split(np.diff(ends.tolist(), prepend=0, append=x.shape[0]).tolist())


# ---- in compiled graphs ----


def _needs_operation(x: Tensor, weight: Tensor) -> bool:
    """Returns whether a product is an operation of ours: torch traces grouped ones of bfloat16 alone."""
    is_compiling = torch.compiler.is_compiling() or x.is_meta
    return is_compiling and not (x.dtype == torch.bfloat16 and _is_one_call(x, weight))


@torch.library.custom_op("moe::grouped_linear", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _product_op(x: Tensor, weight: Tensor, ends: Tensor, transposes: bool) -> Tensor:
    return _product(x, weight, ends, transposes)


@_product_op.register_fake
def _fake_product(x: Tensor, weight: Tensor, ends: Tensor, transposes: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1 if transposes else 2])


@torch.library.custom_op(
    "moe::grouped_linear_weight_gradient", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def _weight_gradient_op(d_product: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return _weight_gradient(d_product, x, weight, ends)


@_weight_gradient_op.register_fake
def _fake_weight_gradient(d_product: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch.empty_like(weight)
