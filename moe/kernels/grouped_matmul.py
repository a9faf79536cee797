"""Products of rows with the weights of their experts, all experts in one call.

Rows are sorted by expert, without padding. The path of devices
other than a CPU, which has cpu_experts.py.
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from moe.kernels.first_order import first_order_only


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Returns x W_e^T for rows sorted by expert.

    One grouped product where torch has it: bfloat16, float16 and float32 with rows of a multiple of
    16 bytes; else one product for each expert.

    Args:
        x: <float>[N, I] rows.
        weight: <float>[E, O, I].
        counts: <int64>[E] rows of each expert. Later rows are never read, and their results are
            undefined.

    Returns:
        <float>[N, O].
    """
    is_compiling = torch.compiler.is_compiling() or x.is_meta
    if not _is_one_call(x, weight):
        return _grouped_linear_op(x, weight, counts) if is_compiling else _loop(x, weight, counts)

    # torch traces grouped products of bfloat16 alone; others are an operation of ours in a graph.
    if is_compiling and x.dtype != torch.bfloat16:
        return _grouped_linear_op(x, weight, counts)
    return _GroupedLinear.apply(x, weight, _row_ends(counts))


def _is_one_call(x: Tensor, weight: Tensor) -> bool:
    """Returns whether torch has one product for all experts: the device reads rows in whole words."""
    row_bytes = [size * x.element_size() for size in weight.shape[1:]]
    is_aligned = all(num_bytes % 16 == 0 for num_bytes in row_bytes)
    return x.dtype != torch.float64 and is_aligned


def _row_ends(counts: Tensor) -> Tensor:
    """Returns <int32>[E] where the rows of each expert end."""
    return counts.cumsum(0, dtype=torch.int32)


def _loop(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Returns the products one expert after the other, which waits for the counts."""
    products = []
    *rows_by_expert, rest = _split_rows(x, counts)
    for rows, expert_weight in zip(rows_by_expert, weight.unbind(), strict=True):
        products.append(F.linear(rows, expert_weight))
    return torch.cat([*products, rest.new_zeros(rest.shape[0], weight.shape[1])])


def _split_rows(x: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    """Returns the rows <float>[n, I] of each expert, and the unused rows after them."""
    sizes = counts.tolist()
    return x.split([*sizes, x.shape[0] - sum(sizes)])


def _gradients(
    d_product: Tensor, x: Tensor, weight: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns dx <float>[N, I] and dW <float>[E, O, I] of y = x W^T, both within each expert."""
    if not x.shape[0]:
        return torch.zeros_like(x), torch.zeros_like(weight)
    if _is_one_call(x, weight):
        return _gradients_in_one_call(d_product, x, weight, _row_ends(counts))

    # dx = dy W and dW = dy^T x.
    d_weights = []
    *d_product_by_expert, _ = _split_rows(d_product, counts)
    *rows_by_expert, _ = _split_rows(x, counts)
    for d_rows, rows in zip(d_product_by_expert, rows_by_expert, strict=True):
        d_weights.append(d_rows.t() @ rows)
    d_x = _loop(d_product, rearrange(weight, "e o i -> e i o"), counts)
    return d_x, torch.stack(d_weights)


def _gradients_in_one_call(
    d_product: Tensor, x: Tensor, weight: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """Same as `_gradients`, by grouped products."""
    d_product = d_product.contiguous()
    d_x = F.grouped_mm(d_product, weight, offs=ends)
    d_weight = F.grouped_mm(rearrange(d_product, "n o -> o n"), x, offs=ends)
    return d_x, d_weight


class _GroupedLinear(torch.autograd.Function):
    """`F.grouped_mm` whose backward accepts gradients of any strides, which torch's own refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return F.grouped_mm(x, rearrange(weight, "e o i -> e i o"), offs=ends)

    @staticmethod
    @first_order_only
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # by the decorator
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        x, weight, ends = ctx.saved_tensors
        if not x.shape[0]:
            return torch.zeros_like(x), torch.zeros_like(weight), None

        return *_gradients_in_one_call(grad_outputs[0], x, weight, ends), None


# ---- in compiled graphs ----


@torch.library.custom_op("moe::grouped_linear", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _grouped_linear_op(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return grouped_linear(x, weight, counts)


@_grouped_linear_op.register_fake
def _fake_product(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op(
    "moe::grouped_linear_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def _gradients_op(
    d_product: Tensor, x: Tensor, weight: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    return _gradients(d_product, x, weight, counts)


@_gradients_op.register_fake
def _fake_gradients(
    d_product: Tensor, x: Tensor, weight: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, d_product: Tensor) -> tuple[Tensor, Tensor, None]:
    d_x, d_weight = _gradients_op(d_product, *ctx.saved_tensors)
    return d_x, d_weight, None


_grouped_linear_op.register_autograd(_backward, setup_context=_save_for_backward)
