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

    def ends(self) -> Tensor:
        """Returns where the rows of each expert end <int32>[E]."""
        return self.counts.cumsum(0, dtype=torch.int32)

    def sum_by_token(self, values: Tensor, *, weighted: bool) -> Tensor:
        """Returns each token's sum over its rows of <float>[N, D], without a graph: <float>[T, D].

        A compiled graph has more rows than the N of the values, which come first.
        """
        if not values.shape[0]:
            return values.new_zeros(self.token_start.numel(), values.shape[1])

        # The rows of a token as one bag, in the order of the bags.
        row = self.by_token[: values.shape[0]]
        weight = self.weight.to(values.dtype).index_select(0, row) if weighted else None
        return F.embedding_bag(row, values, self.token_start, mode="sum", per_sample_weights=weight)

    def weight_of_rows(self) -> Tensor:
        """Returns the combine weight <float>[N] of each row."""
        return self.weight

    def of_weights(self, values: Tensor) -> Tensor:
        """Returns values <float>[N] of the rows in the order of `weight`."""
        return values


class ChoiceRows(NamedTuple):
    """A row for every choice of every token, sorted by expert; no shape depends on the choices.

    Rows of refused choices come after those of all experts, with undefined values.

    Attributes:
        ends: <int32>[E] where the rows of each expert end.
        choice: <int64>[T * K] choice of each row, an index into [T * K].
        token: <int64>[T * K] token of each row, an index into [T, D].
        row: <int64>[T, K] row of each choice: the inverse of `choice`.
        refused: <bool>[T, K] choices that no expert has a row for.
        weight: <float>[T, K] combine weight of each choice.
    """

    ends: Tensor
    choice: Tensor
    token: Tensor
    row: Tensor
    refused: Tensor
    weight: Tensor

    def sum_by_token(self, values: Tensor, *, weighted: bool) -> Tensor:
        """Returns each token's sum over its accepted choices of <float>[T * K, D]: <float>[T, D].

        A token reads its rows, and no row is added to a token: sums have one order on any device.
        """
        by_choice = self._by_choice(values)  # [T, K, D]
        if weighted:
            by_choice = by_choice * self.weight[..., None]

        # In the dtype of the values, which CUDA's autocast would not leave to a sum.
        return by_choice.sum(dim=1, dtype=values.dtype)

    def weight_of_rows(self) -> Tensor:
        """Returns the combine weight <float>[T * K] of each row."""
        return self.weight.flatten().index_select(0, self.choice)

    def of_weights(self, values: Tensor) -> Tensor:
        """Returns values <float>[T * K] of the rows in the order of `weight`; zeros for refused choices."""
        return self._by_choice(values[:, None]).squeeze(-1)

    def _by_choice(self, values: Tensor) -> Tensor:
        """Returns values <float>[T * K, D] of rows by choice <float>[T, K, D]; zeros for refused ones."""
        by_choice = values.index_select(0, self.row.flatten()).unflatten(0, self.row.shape)
        return by_choice.masked_fill_(self.refused[..., None], 0)


def gather_rows(tokens: Tensor, rows: ExpertRows | ChoiceRows) -> Tensor:
    """Returns the rows, copied from their tokens; differentiable in the tokens.

    Args:
        tokens: <float>[T, D].
        rows: The token of each row.

    Returns:
        <float>[N, D].
    """
    return _GatherRows.apply(tokens, rows)


def combine_rows(outputs: Tensor, rows: ExpertRows | ChoiceRows) -> Tensor:
    """Returns every token's weighted sum over its rows; differentiable in outputs and weights.

    Args:
        outputs: <float>[N, D] of the experts.
        rows: The rows and their weights.

    Returns:
        <float>[T, D]; zeros for a token without rows.
    """
    rows = rows._replace(weight=rows.weight.to(outputs.dtype))
    return _CombineRows.apply(outputs, rows.weight, rows)


def used_rows(rows: ExpertRows) -> ExpertRows:
    """Returns the rows of experts, without those after them, which a compiled graph has.

    `by_token` needs no change: its first N are theirs.
    """
    num_rows = int(rows.counts.sum())
    return rows._replace(token=rows.token[:num_rows], weight=rows.weight[:num_rows])


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

    # Place of each row: after those that were added to earlier experts.
    num_rows = rows.token.numel()
    num_places = sum(rounded)
    rounded_counts = torch.tensor(rounded)  # [E]
    added = rounded_counts - rows.counts
    shift = (added.cumsum(0) - added).repeat_interleave(rows.counts, output_size=num_rows)
    row = torch.arange(num_rows)
    place = row + shift  # [N]

    # The row that each place repeats: its own, or the last of its expert.
    last = rows.counts.cumsum(0) - 1  # [E]
    source = last.repeat_interleave(rounded_counts, output_size=num_places)  # [N']
    source[place] = row

    weight = rows.weight.new_zeros(num_places)
    return ExpertRows(
        counts=rounded_counts,
        token=rows.token.index_select(0, source),
        weight=weight.index_copy(0, place, rows.weight),
        by_token=place.index_select(0, rows.by_token),
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
    def forward(ctx: Any, tokens: Tensor, rows: ExpertRows | ChoiceRows) -> Tensor:
        ctx.kind = type(rows)
        ctx.save_for_backward(*rows)
        return tokens.index_select(0, rows.token)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        rows = ctx.kind(*ctx.saved_tensors)
        return rows.sum_by_token(grad_outputs[0], weighted=False), None


class _CombineRows(torch.autograd.Function):
    """`combine_rows`: y_t = sum over the rows n of token t of w_n o_n."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weight: Tensor, rows: ExpertRows | ChoiceRows) -> Tensor:
        ctx.kind = type(rows)
        ctx.save_for_backward(outputs, *rows)
        return rows.sum_by_token(outputs, weighted=True)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        outputs, *tensors = ctx.saved_tensors
        rows = ctx.kind(*tensors)
        d_rows = grad_outputs[0].index_select(0, rows.token)  # [N, D]

        # dw_n = dy_t . o_n and do_n = w_n dy_t, with t the token of row n.
        d_weight = torch.linalg.vecdot(d_rows, outputs)  # [N]
        d_rows *= rows.weight_of_rows()[:, None]
        return d_rows, rows.of_weights(d_weight), None
