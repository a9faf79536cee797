"""Hidden units of rows as an operator of Triton: activation, gate, bias and dropout in one kernel.

What hidden_units.py computes by torch's operations. The first product is read once, and nothing but
the result is written; backwards it is read again, so that nothing between is kept. Dropout's mask
is a function of a seed and of where a unit stands: the backward pass draws it again.

A bias's gradient is summed over the rows of its expert in one order, without atomic additions: two
runs give equal bits.
"""

# Triton is for Linux alone.
# pyright: reportMissingImports=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.kernels.hidden_units import ExpertForm
from moe.kernels.triton_launch import block_size, launch

# Parts of the rows of all experts in the sum of a bias's gradient: work for every processor.
_NUM_PARTS = 256


def triton_hidden(product: Tensor, bias: Tensor | None, counts: Tensor, form: ExpertForm) -> Tensor:
    """Returns the hidden units of rows sorted by expert, as `hidden_rows`.

    Args:
        product: <float>[N, 2F or F] the first product, gate first.
        bias: <float>[E, F] of each expert's hidden units; None for none.
        counts: <int64>[E] rows of each expert. What is returned for rows behind them is of any
            value, and so is its gradient.
        form: What an expert computes.

    Returns:
        <float>[N, F].
    """
    # Drawn on the device: checkpointing and CUDA graphs know of it, and nobody waits.
    seed = None
    if form.dropout_rate:
        seed = torch.randint(2**62, (), device=product.device)

    # A kernel is compiled for each kind of expert.
    is_gelu = form.activation == "gelu"
    is_factor = form.bias_kind == "multiplicative"
    kind = (is_gelu, form.gated, is_factor, form.dropout_rate)

    # A shard of a bias may have any strides.
    if bias is not None:
        bias = bias.contiguous()
    return _hidden(product, bias, counts.cumsum(0), seed, *kind)


# ---- parts of kernels ----


@triton.jit
def _read_halves(product, row, column, d_ff, IS_GATED: tl.constexpr, COMPUTE: tl.constexpr):
    """Returns the gate z' of a row, and the half z'' that it is multiplied with: 1 without gates."""
    is_inside = column < d_ff
    if IS_GATED:
        start = product + row * d_ff * 2
        up = tl.load(start + d_ff + column, is_inside, 0).to(COMPUTE)
    else:
        start = product + row * d_ff
        up = 1.0
    return tl.load(start + column, is_inside, 0).to(COMPUTE), up


@triton.jit
def _activate(z, IS_GELU: tl.constexpr):
    """Returns act(z) and its slope; a ReLU keeps NaN."""
    # gelu(z) = z s with s = sigmoid(2u) and u = sqrt(2 / pi) (z + 0.044715 z^3).
    if IS_GELU:
        s = tl.sigmoid(1.5957691216057308 * z * (1 + 0.044715 * z * z))
        d_exponent = 1.5957691216057308 * (1 + 0.134145 * z * z)
        units = z * s
        slope = s + units * (1 - s) * d_exponent
    else:
        units = tl.where(z <= 0, 0.0, z)
        slope = tl.where(z <= 0, 0.0, 1.0)
    return units, slope


@triton.jit
def _read_bias(bias, ends, row, column, d_ff, NUM_EXPERTS: tl.constexpr):
    """Returns the bias of the expert of a row."""
    # As many experts come before it as end at the row or above.
    experts = tl.arange(0, triton.next_power_of_2(NUM_EXPERTS))  # pyright: ignore[reportArgumentType]
    is_expert = experts < NUM_EXPERTS
    end = tl.load(ends + experts, is_expert, 0)
    expert = tl.sum((is_expert & (end <= row)).to(tl.int64))
    return tl.load(bias + expert * d_ff + column, column < d_ff, 0)


@triton.jit
def _dropout_factor(seed, row, start, d_ff, NUM_DROPPED: tl.constexpr, BLOCK: tl.constexpr):
    """Returns 0 for units that dropout drops, and one over the share kept for those that it keeps."""
    # A draw yields four numbers below 2^31, for four units side by side.
    draws_of_row = tl.cdiv(d_ff, 4)
    draw = row * draws_of_row + start // 4 + tl.arange(0, BLOCK // 4)
    a, b, c, d = tl.randint4x(tl.load(seed), draw)
    numbers = tl.join(tl.join(a, b), tl.join(c, d))  # [BLOCK / 4, 2, 2]
    numbers = tl.reshape(numbers, [BLOCK]).to(tl.int32, bitcast=True)
    numbers = tl.where(numbers < 0, ~numbers, numbers)
    return tl.where(numbers >= NUM_DROPPED, 2147483648 / (2147483648 - NUM_DROPPED), 0.0)


# ---- kernels ----


@triton.jit
def _hidden_kernel(
    product,
    hidden,
    bias,
    ends,
    seed,
    d_ff,
    IS_GELU: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_FACTOR: tl.constexpr,
    NUM_DROPPED: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Writes a block of the hidden units of one row."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(ends + NUM_EXPERTS - 1):
        return
    start = tl.program_id(1) * BLOCK
    column = start + tl.arange(0, BLOCK)

    # act(z') z'', then bias, then dropout.
    gate, up = _read_halves(product, row, column, d_ff, IS_GATED, COMPUTE)
    activated, _ = _activate(gate, IS_GELU)
    units = activated * up
    if bias is not None:
        row_bias = _read_bias(bias, ends, row, column, d_ff, NUM_EXPERTS).to(COMPUTE)
        units = units * row_bias if IS_FACTOR else units + row_bias
    if seed is not None:
        units *= _dropout_factor(seed, row, start, d_ff, NUM_DROPPED, BLOCK)
    tl.store(hidden + row * d_ff + column, units, column < d_ff)


@triton.jit
def _product_gradient_kernel(
    d_hidden,
    product,
    d_product,
    bias,
    ends,
    seed,
    d_ff,
    IS_GELU: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_FACTOR: tl.constexpr,
    NUM_DROPPED: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Writes a block of the gradient of one row of the first product."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(ends + NUM_EXPERTS - 1):
        return
    start = tl.program_id(1) * BLOCK
    column = start + tl.arange(0, BLOCK)
    is_inside = column < d_ff

    # Back through dropout and bias.
    d_units = tl.load(d_hidden + row * d_ff + column, is_inside, 0).to(COMPUTE)
    if seed is not None:
        d_units *= _dropout_factor(seed, row, start, d_ff, NUM_DROPPED, BLOCK)
    if IS_FACTOR:
        d_units *= _read_bias(bias, ends, row, column, d_ff, NUM_EXPERTS).to(COMPUTE)

    # With the units act(z') z'': dz' = d z'' act'(z'), and dz'' = d act(z').
    gate, up = _read_halves(product, row, column, d_ff, IS_GATED, COMPUTE)
    activated, slope = _activate(gate, IS_GELU)
    target = d_product + row * d_ff + column
    if IS_GATED:
        target += row * d_ff
        tl.store(target + d_ff, d_units * activated, is_inside)
    tl.store(target, d_units * up * slope, is_inside)


@triton.jit
def _bias_gradient_kernel(
    d_hidden,
    product,
    d_bias,
    ends,
    seed,
    d_ff,
    IS_GELU: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_FACTOR: tl.constexpr,
    NUM_DROPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Writes the sum over a part of an expert's rows: of n parts, each has every n-th row."""
    expert = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    start = tl.program_id(2) * BLOCK
    column = start + tl.arange(0, BLOCK)
    is_inside = column < d_ff
    first = tl.load(ends + expert - 1, expert > 0, 0) + part

    # From the first row to the last.
    total = tl.zeros([BLOCK], COMPUTE)
    for row in range(first, tl.load(ends + expert), tl.num_programs(1)):
        d_units = tl.load(d_hidden + row * d_ff + column, is_inside, 0).to(COMPUTE)
        if seed is not None:
            d_units *= _dropout_factor(seed, row, start, d_ff, NUM_DROPPED, BLOCK)
        if IS_FACTOR:
            gate, up = _read_halves(product, row, column, d_ff, IS_GATED, COMPUTE)
            activated, _ = _activate(gate, IS_GELU)
            d_units *= activated * up
        total += d_units

    place = part * tl.num_programs(0) + expert
    tl.store(d_bias + place * d_ff + column, total, is_inside)


# ---- operators ----


def _num_dropped(rate: float) -> int:
    """Returns below which of the numbers from 0 to 2^31 - 1 a draw drops its unit."""
    return min(round(rate * 2**31), 2**31 - 1)


@torch.library.custom_op("moe::triton_hidden", mutates_args=())
def _hidden(
    product: Tensor,
    bias: Tensor | None,
    ends: Tensor,
    seed: Tensor | None,
    is_gelu: bool,
    is_gated: bool,
    is_factor: bool,
    drop_rate: float,
) -> Tensor:
    """Returns the hidden units <float>[N, F]; `ends` is <int64>[E], where each expert's rows end."""
    num_rows, width = product.shape
    d_ff = width // 2 if is_gated else width
    hidden = product.new_empty(num_rows, d_ff)

    # One program for each block of a row.
    block = block_size(d_ff)
    grid = (num_rows, triton.cdiv(d_ff, block))
    operands = (product.contiguous(), hidden, bias, ends, seed, d_ff)
    kind = (is_gelu, is_gated, is_factor, _num_dropped(drop_rate))
    launch(_hidden_kernel, grid, product, *operands, *kind, ends.shape[0], block)
    return hidden


@torch.library.custom_op("moe::triton_hidden_backward", mutates_args=())
def _hidden_backward(
    d_hidden: Tensor,
    product: Tensor,
    bias: Tensor | None,
    ends: Tensor,
    seed: Tensor | None,
    is_gelu: bool,
    is_gated: bool,
    is_factor: bool,
    drop_rate: float,
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of product and bias; an empty one where there is no bias."""
    num_rows, d_ff = d_hidden.shape
    d_hidden = d_hidden.contiguous()
    product = product.contiguous()
    d_product = torch.empty_like(product)

    # One program for each block of a row.
    kind = (is_gelu, is_gated, is_factor, _num_dropped(drop_rate))
    block = block_size(d_ff)
    num_blocks = triton.cdiv(d_ff, block)
    operands = (d_hidden, product, d_product, bias, ends, seed, d_ff)
    grid = (num_rows, num_blocks)
    launch(_product_gradient_kernel, grid, product, *operands, *kind, ends.shape[0], block)
    if bias is None:
        return d_product, product.new_empty(0)

    # The more experts, the fewer parts of each; their sums are added up in one order, too.
    num_experts = ends.shape[0]
    num_parts = max(1, _NUM_PARTS // num_experts)
    sum_dtype = torch.promote_types(product.dtype, torch.float32)
    d_bias = product.new_empty(num_parts, *bias.shape, dtype=sum_dtype)  # [parts, E, F]
    grid = (num_experts, num_parts, num_blocks)
    operands = (d_hidden, product, d_bias, ends, seed, d_ff)
    launch(_bias_gradient_kernel, grid, product, *operands, *kind, block)
    return d_product, d_bias.sum(dim=0).to(bias.dtype)


@_hidden.register_fake
def _fake_hidden(product: Tensor, *others: Any) -> Tensor:
    _, _, _, _, is_gated, _, _ = others
    num_rows, width = product.shape
    return product.new_empty(num_rows, width // 2 if is_gated else width)


@_hidden_backward.register_fake
def _fake_hidden_backward(
    d_hidden: Tensor, product: Tensor, bias: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor]:
    d_bias = product.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return product.new_empty(product.shape), d_bias


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    product, bias, ends, seed, *ctx.kind = inputs
    ctx.save_for_backward(product, bias, ends, seed)


def _gradients(ctx: Any, d_hidden: Tensor) -> tuple[Tensor | None, ...]:
    d_product, d_bias = _hidden_backward(d_hidden, *ctx.saved_tensors, *ctx.kind)
    has_bias = ctx.needs_input_grad[1]
    return d_product, d_bias if has_bias else None, *[None] * 6


_hidden.register_autograd(_gradients, setup_context=_save_for_backward)
