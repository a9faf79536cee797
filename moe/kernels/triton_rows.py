"""Tokens to rows and back as operators of Triton: what `ChoiceRows` of expert_rows.py describe.

Two kernels, each the other's backward pass: a token is copied to its rows, and rows are summed up
in their token. A weighted sum's backward pass is a weighted copy, which yields the gradients of the
weights on its way.

One program has one token, and writes or reads its rows one after the other. So there are no atomic
additions, and two runs give equal bits. Rows of refused choices are neither read nor written.
"""

# Triton is for Linux alone.
# pyright: reportMissingImports=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.kernels.expert_rows import ChoiceRows
from moe.kernels.triton_launch import block_size, launch


def triton_gather(tokens: Tensor, rows: ChoiceRows) -> Tensor:
    """Returns a row for every choice, as `gather_choices`; those of refused ones hold anything.

    Args:
        tokens: <float>[T, D].
        rows: Which choice each row is.

    Returns:
        <float>[T * K, D].
    """
    copies, _ = _copy(tokens, rows.row, rows.counts.sum(), None, None)
    return copies


def triton_combine(outputs: Tensor, rows: ChoiceRows) -> Tensor:
    """Returns every token's weighted sum over its accepted choices, as `combine_choices`.

    Args:
        outputs: <float>[T * K, D] of the experts.
        rows: The rows and their weights.

    Returns:
        <float>[T, D]; zeros for a token without accepted choices.
    """
    return _sum(outputs, rows.row, rows.counts.sum(), rows.weight)


# ---- kernels ----


@triton.jit
def _copy_kernel(
    tokens,
    rows,
    row_of_choice,
    num_rows,
    weight,
    outputs,
    d_weight,
    num_choices,
    width,
    BLOCK: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Copies a token to the rows of its accepted choices.

    With weights w_tk the token is dy_t: the copy is w_tk dy_t, and dw_tk = dy_t . o_n of its row.
    """
    token = tl.program_id(0).to(tl.int64)
    end = tl.load(num_rows)
    for k in range(num_choices):
        choice = token * num_choices + k
        row = tl.load(row_of_choice + choice)
        row_width = tl.where(row < end, width, 0)  # nothing of a refused choice
        factor = 1.0
        products = tl.zeros([BLOCK], COMPUTE)
        if weight is not None:
            factor = tl.load(weight + choice).to(COMPUTE)

        # A block of the token at a time.
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            has_row = column < row_width
            x = tl.load(tokens + token * width + column, column < width, 0)
            if weight is not None:
                output = tl.load(outputs + row * width + column, has_row, 0)
                x = x.to(COMPUTE)
                products += x * output.to(COMPUTE)
                x *= factor
            tl.store(rows + row * width + column, x, has_row)

        if weight is not None:
            tl.store(d_weight + choice, tl.sum(products))


@triton.jit
def _sum_kernel(
    rows,
    tokens,
    row_of_choice,
    num_rows,
    weight,
    num_choices,
    width,
    BLOCK: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Sums up the rows of a token's accepted choices, with weights where they are given."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(num_rows)

    # In the order of the choices, whatever the order of the programs.
    total = tl.zeros([BLOCK], COMPUTE)
    for k in range(num_choices):
        choice = token * num_choices + k
        row = tl.load(row_of_choice + choice)
        row_width = tl.where(row < end, width, 0)  # nothing of a refused choice
        x = tl.load(rows + row * width + column, column < row_width, 0).to(COMPUTE)
        if weight is not None:
            x *= tl.load(weight + choice).to(COMPUTE)
        total += x
    tl.store(tokens + token * width + column, total, column < width)


# ---- operators ----


@torch.library.custom_op("moe::triton_copy", mutates_args=())
def _copy(
    tokens: Tensor, row: Tensor, num_rows: Tensor, weight: Tensor | None, outputs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns rows <float>[T * K, D] of tokens, and the gradient <float>[T, K] of weights, if any.

    `row` is <int64>[T, K], the row of each choice; `num_rows` counts those of accepted choices;
    `outputs` are the rows that the weights were for.
    """
    num_tokens, width = tokens.shape
    rows = tokens.new_empty(row.numel(), width)
    d_weight = tokens.new_empty(0)
    if weight is not None and outputs is not None:
        weight = weight.contiguous()
        outputs = outputs.contiguous()
        d_weight = torch.empty_like(weight)

    # One program for each token.
    operands = (tokens.contiguous(), rows, row.contiguous(), num_rows, weight, outputs, d_weight)
    sizes = (row.shape[1], width, block_size(width))
    launch(_copy_kernel, (num_tokens,), tokens, *operands, *sizes)
    return rows, d_weight


@torch.library.custom_op("moe::triton_sum", mutates_args=())
def _sum(rows: Tensor, row: Tensor, num_rows: Tensor, weight: Tensor | None) -> Tensor:
    """Returns tokens <float>[T, D], sums of rows <float>[T * K, D]; the rest as for `_copy`."""
    num_tokens, num_choices = row.shape
    width = rows.shape[1]
    tokens = rows.new_empty(num_tokens, width)
    if weight is not None:
        weight = weight.contiguous()

    # One program for each block of a token.
    block = block_size(width)
    grid = (num_tokens, triton.cdiv(width, block))
    operands = (rows.contiguous(), tokens, row.contiguous(), num_rows, weight)
    launch(_sum_kernel, grid, rows, *operands, num_choices, width, block)
    return tokens


@_copy.register_fake
def _fake_copy(
    tokens: Tensor, row: Tensor, num_rows: Tensor, weight: Tensor | None, outputs: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows = tokens.new_empty(row.numel(), tokens.shape[1])
    return rows, tokens.new_empty(0) if weight is None else weight.new_empty(weight.shape)


@_sum.register_fake
def _fake_sum(rows: Tensor, row: Tensor, num_rows: Tensor, weight: Tensor | None) -> Tensor:
    return rows.new_empty(row.shape[0], rows.shape[1])


def _save_copy(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, row, num_rows, weight, _ = inputs
    ctx.is_weighted = weight is not None
    ctx.save_for_backward(row, num_rows)


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _copy_gradients(ctx: Any, d_rows: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    # A weighted copy is itself a gradient.
    if ctx.is_weighted:
        raise RuntimeError("The combination of rows by Triton has no second derivative.")
    return _sum(d_rows, *ctx.saved_tensors, None), None, None, None, None


def _sum_gradients(ctx: Any, d_tokens: Tensor) -> tuple[Tensor | None, ...]:
    rows, row, num_rows, weight = ctx.saved_tensors
    d_rows, d_weight = _copy(d_tokens, row, num_rows, weight, rows)
    return d_rows, None, None, None if weight is None else d_weight


_copy.register_autograd(_copy_gradients, setup_context=_save_copy)
_sum.register_autograd(_sum_gradients, setup_context=_save_sum)
