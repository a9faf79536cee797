"""Rows of experts: which token each row is, how tokens become rows, and rows tokens again.

A token that uses two experts is two rows. Rows stand sorted by expert, since an expert works on all
of its rows at once; a token's sum over its rows needs the opposite order, which `ExpertRows` holds
too. Sums read the rows of a token side by side: that needs no atomic additions, and its result does
not depend on the number of threads.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ExpertRows(NamedTuple):
    """Which token each row is; no row stands for an empty slot or a dropped token.

    Attributes:
        counts: <int64>[E] rows of each expert; they add up to N.
        token: <int64>[N] token of each row, an index into [T, D].
        weight: <float>[N] combine weight of each row.
        by_token: <int64>[N] the rows in the order of their tokens.
        token_start: <int64>[T] where each token's rows begin in `by_token`.
    """

    counts: Tensor
    token: Tensor
    weight: Tensor
    by_token: Tensor
    token_start: Tensor


def gather_rows(tokens: Tensor, rows: ExpertRows) -> Tensor:
    """Returns the rows, copied from their tokens; differentiable in the tokens.

    Args:
        tokens: <float>[T, D].
        rows: Which token each row is.

    Returns:
        <float>[N, D].
    """
    return _GatherRows.apply(tokens, rows)


def combine_rows(outputs: Tensor, rows: ExpertRows) -> Tensor:
    """Returns every token's weighted sum over its rows; differentiable in outputs and weights.

    Args:
        outputs: <float>[N, D] of the experts.
        rows: The rows and their weights.

    Returns:
        <float>[T, D]; zeros for a token without rows.
    """
    return _CombineRows.apply(outputs, rows.weight, rows)


def sum_by_token(outputs: Tensor, rows: ExpertRows, weight: Tensor | None) -> Tensor:
    """Returns each token's sum over its rows, without a graph.

    Args:
        outputs: <float>[N, D].
        rows: Which token each row is.
        weight: <float>[N] of each row; None sums them as they are.

    Returns:
        <float>[T, D]; zeros for a token without rows.
    """
    num_tokens = rows.token_start.numel()
    if not outputs.shape[0]:
        return outputs.new_zeros(num_tokens, outputs.shape[1])

    # The rows of a token as one bag, in the order of the bags.
    if weight is not None:
        weight = weight.to(outputs.dtype).index_select(0, rows.by_token)
    return F.embedding_bag(
        rows.by_token, outputs, rows.token_start, mode="sum", per_sample_weights=weight
    )


class _GatherRows(torch.autograd.Function):
    """`gather_rows`; backwards every token sums up its rows at once."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, rows: ExpertRows) -> Tensor:
        ctx.rows = rows
        return tokens.index_select(0, rows.token)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # by the decorator
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None]:
        return sum_by_token(grad_outputs[0], ctx.rows, None), None


class _CombineRows(torch.autograd.Function):
    """`combine_rows`: y_t = sum over the rows n of token t of w_n o_n."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weight: Tensor, rows: ExpertRows) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(outputs, weight)
        return sum_by_token(outputs, rows, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # by the decorator
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        outputs, weight = ctx.saved_tensors
        d_rows = grad_outputs[0].index_select(0, ctx.rows.token)  # [N, D]

        # dw_n = dy_t . o_n and do_n = w_n dy_t, with t the token of row n.
        d_weight = torch.linalg.vecdot(d_rows, outputs).to(weight.dtype)  # [N]
        d_rows *= weight[:, None].to(d_rows.dtype)
        return d_rows, d_weight, None
