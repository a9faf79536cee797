"""Rows of experts: the token of each row, tokens to rows, and rows back to tokens.

A token that uses two experts is two rows. Rows are sorted by expert, since an expert works on all
of its rows at once; a token's sum over its rows needs the opposite order, which `ExpertRows` holds
too. Sums read the rows of a token side by side: that needs no atomic additions, and its result does
not depend on the number of threads.

`ExpertRows` has exactly the rows that experts work on, which must be counted first. `ChoiceRows`
has one for every choice of every token, so that nobody waits for a count.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.kernels.first_order import first_order_only

# Rows of an expert that are not rounded up: products of one to 64 rows are few enough to prepare.
_MOST_EXACT_ROWS = 64


class ExpertRows(NamedTuple):
    """The token of each row; empty slots and dropped tokens have no row.

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


class ChoiceRows(NamedTuple):
    """A row for every choice of every token, sorted by expert; no shape depends on the choices.

    Rows of refused choices come after those of all experts, with undefined values.

    Attributes:
        counts: <int64>[E] rows of each expert.
        choice: <int64>[T * K] choice of each row, an index into [T * K].
        token: <int64>[T * K] token of each row, an index into [T, D].
        row: <int64>[T, K] row of each choice: the inverse of `choice`.
        refused: <bool>[T, K] choices that no expert has a row for.
        weight: <float>[T, K] combine weight of each choice.
    """

    counts: Tensor
    choice: Tensor
    token: Tensor
    row: Tensor
    refused: Tensor
    weight: Tensor


def gather_rows(tokens: Tensor, rows: ExpertRows) -> Tensor:
    """Returns the rows, copied from their tokens; differentiable in the tokens.

    Args:
        tokens: <float>[T, D].
        rows: The token of each row.

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


def gather_choices(tokens: Tensor, rows: ChoiceRows) -> Tensor:
    """Returns a row for every choice, copied from its token; differentiable in the tokens.

    Args:
        tokens: <float>[T, D].
        rows: The choice of each row.

    Returns:
        <float>[T * K, D].
    """
    return _GatherChoices.apply(tokens, rows)


def combine_choices(outputs: Tensor, rows: ChoiceRows) -> Tensor:
    """Returns every token's weighted sum over its accepted choices.

    Differentiable in outputs and weights. A token reads its rows, and no row is added to a token:
    sums have one order on any device, and need no atomic additions.

    Args:
        outputs: <float>[T * K, D] of the experts.
        rows: The rows and their weights.

    Returns:
        <float>[T, D]; zeros for a token without accepted choices.
    """
    return _CombineChoices.apply(outputs, rows.weight, rows)


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


def used_rows(rows: ExpertRows) -> ExpertRows:
    """Returns the rows of experts, without those after them, which a compiled graph has."""
    num_rows = int(rows.counts.sum())
    return rows._replace(
        token=rows.token[:num_rows],
        weight=rows.weight[:num_rows],
        by_token=rows.by_token[:num_rows],
    )


def round_up_rows(rows: ExpertRows) -> ExpertRows:
    """Returns the rows with each expert's number of them rounded up.

    oneDNN prepares itself, for 1 to 2 ms, for every number of rows that it has not seen, and the
    number changes with every step. Up to 64 rows stay as they are; beyond that there are 16 numbers
    between a power of two and the next, so that at most a sixteenth is added.

    Added rows repeat the last of their expert and weigh nothing: they add zeros to all gradients,
    and no token reads them.

    Args:
        rows: Rows sorted by expert; differentiable in their weights.
    """
    counts = rows.counts.tolist()
    rounded = [rounded_count(count) for count in counts]
    if rounded == counts:
        return rows

    # Position of each row: after the rows that were added to earlier experts.
    num_slots = sum(rounded)
    device = rows.token.device
    rounded_counts = torch.tensor(rounded, device=device)  # [E]
    start = rows.counts.cumsum(0) - rows.counts
    rounded_start = rounded_counts.cumsum(0) - rounded_counts
    shift = (rounded_start - start).repeat_interleave(rows.counts, output_size=rows.token.numel())
    new_place = torch.arange(rows.token.numel(), device=device) + shift  # [N]

    # The row that each place repeats: its own, or the last of its expert.
    last = rows.counts - 1  # [E]
    expert = torch.arange(len(counts), device=device)
    expert = expert.repeat_interleave(rounded_counts, output_size=num_slots)  # [N']
    place = torch.arange(num_slots, device=device) - rounded_start[expert]
    source = start[expert] + torch.minimum(place, last[expert])  # [N']

    weight = rows.weight.new_zeros(num_slots)
    return ExpertRows(
        counts=rounded_counts,
        token=rows.token.index_select(0, source),
        weight=weight.index_copy(0, new_place, rows.weight),
        by_token=new_place.index_select(0, rows.by_token),
        token_start=rows.token_start,
    )


def rounded_count(count: int) -> int:
    """Returns a number of rows as `round_up_rows` rounds it."""
    if count <= _MOST_EXACT_ROWS:
        return count
    step = 2 ** (count.bit_length() - 5)
    return -(-count // step) * step


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
    @first_order_only
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # by the decorator
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        outputs, weight = ctx.saved_tensors
        d_rows = grad_outputs[0].index_select(0, ctx.rows.token)  # [N, D]

        # dw_n = dy_t . o_n and do_n = w_n dy_t, with t the token of row n.
        d_weight = torch.linalg.vecdot(d_rows, outputs).to(weight.dtype)  # [N]
        d_rows *= weight[:, None].to(d_rows.dtype)
        return d_rows, d_weight, None


class _GatherChoices(torch.autograd.Function):
    """`gather_choices`; backwards every token sums up the rows of its accepted choices."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, rows: ChoiceRows) -> Tensor:
        ctx.save_for_backward(*rows)
        return tokens.index_select(0, rows.token)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # by the decorator
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None]:
        rows = ChoiceRows(*ctx.saved_tensors)
        d_rows = grad_outputs[0]
        return _by_choice(d_rows, rows).sum(dim=1, dtype=d_rows.dtype), None


class _CombineChoices(torch.autograd.Function):
    """`combine_choices`: y_t = sum over the choices k of token t of w_tk o_tk."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weight: Tensor, rows: ChoiceRows) -> Tensor:
        ctx.save_for_backward(outputs, *rows)
        weight = weight[..., None].to(outputs.dtype)  # [T, K, 1]

        # In the dtype of the outputs, which CUDA's autocast would not leave to a sum.
        weighted = _by_choice(outputs, rows) * weight  # [T, K, D]
        return weighted.sum(dim=1, dtype=outputs.dtype)

    @staticmethod
    @first_order_only
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # by the decorator
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        outputs, *tensors = ctx.saved_tensors
        rows = ChoiceRows(*tensors)
        d_y = grad_outputs[0]  # [T, D]

        # dw_tk = dy_t . o_tk, where rows of refused choices are zeros.
        d_weight = torch.linalg.vecdot(_by_choice(outputs, rows), d_y[:, None])  # [T, K]
        d_weight = d_weight.to(rows.weight.dtype)

        # do_n = w_n dy_t, with t the token of row n.
        weight = rows.weight.flatten().index_select(0, rows.choice)  # [T * K]
        d_outputs = d_y.index_select(0, rows.token) * weight[:, None].to(d_y.dtype)
        return d_outputs, d_weight, None


def _by_choice(values: Tensor, rows: ChoiceRows) -> Tensor:
    """Returns values <float>[T * K, D] of rows by choice <float>[T, K, D]; zeros for refused ones."""
    by_choice = values.index_select(0, rows.row.flatten())  # [T * K, D]
    by_choice = by_choice.unflatten(0, rows.row.shape)
    return by_choice.masked_fill_(rows.refused[..., None], 0)
