"""Experts on other ranks: rows go out over the ep axis, are worked on where their experts are, and
come back.

Dispatch and combine stay those of dispatch.py; the routing weights never leave. `ragged` sends the
accepted rows and their counts; `static` sends every slot, empty or not, and waits for nothing on
the way.

Received rows carry a weight of 1. Experts that write them in the order of arrival, without a
weight, and a gradient of the combination in pieces that fit the cache were no faster on a CPU (a
layer took 47.4 ms of CPU time either way).
"""

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from moe.distributed.all_to_all import equal_route, send_counts, send_rows
from moe.distributed.mesh import ExpertAxis
from moe.kernels.cpu_experts import sum_by_token
from moe.sparse.dispatch import ExpertRows, combine_slots, dispatch_slots, fill_slots, sort_rows
from moe.sparse.experts import Experts
from moe.sparse.plan import DispatchPlan


def start_ragged(
    tokens: Tensor, plan: DispatchPlan, num_experts: int, experts: Experts, axis: ExpertAxis
) -> Callable[[], Tensor]:
    """Sends accepted rows to their experts, and returns a function that brings back what they make
    of them.

    Args:
        tokens: <float>[T, D] of this rank, in the dtype that travels.
        plan: Where they go.
        num_experts: E, on all ranks together.
        experts: Those of this rank.
        axis: The ranks.

    Returns:
        A function that returns every token's weighted sum <float>[T, D].
    """
    rows = sort_rows(plan, num_experts)
    counts = send_counts(rows.counts, axis)
    leaving = _GatherRows.apply(tokens, rows)
    received, route = counts.wait()
    arrive = send_rows(leaving, route, "dispatch")

    def finish() -> Tensor:
        outputs = experts(arrive.wait(), sort_received(received))
        return _CombineRows.apply(
            send_rows(outputs, route, "combine", reverse=True).wait(), rows.weight, rows
        )

    return finish


def start_static(
    tokens: Tensor, plan: DispatchPlan, num_experts: int, experts: Experts, axis: ExpertAxis
) -> Callable[[], Tensor]:
    """Does what `start_ragged` does with fixed slots; every rank must have as many of them."""
    slots = fill_slots(plan, num_experts)
    buffers = rearrange(dispatch_slots(tokens, slots), "e n d -> (e n) d")
    route = equal_route(axis, buffers.shape[0], buffers.device)
    arrive = send_rows(buffers, route, "dispatch")
    sizes = {"p": axis.size, "e": num_experts // axis.size}

    def finish() -> Tensor:
        inputs = rearrange(arrive.wait(), "(p e n) d -> e (p n) d", **sizes)
        outputs = rearrange(experts(inputs), "e (p n) d -> (p e n) d", **sizes)
        back = send_rows(outputs, route, "combine", reverse=True).wait()
        return combine_slots(
            rearrange(back, "(e n) d -> e n d", e=num_experts), slots, tokens.shape[0]
        )

    return finish


def sort_received(counts: Tensor) -> ExpertRows:
    """Returns which received row each row of each expert here is; all have weight 1, for their own
    is elsewhere.

    Args:
        counts: <int64>[ep, E / ep] rows from each rank for each expert; they arrive in this order.
    """
    expert = torch.arange(counts.shape[1], device=counts.device).expand_as(counts).flatten()
    expert = expert.repeat_interleave(counts.flatten())
    token = expert.argsort(stable=True)
    rows = torch.arange(token.numel(), device=token.device)
    weight = torch.ones(token.numel(), device=token.device)
    return ExpertRows(
        counts.sum(dim=0), token, weight, torch.empty_like(token).scatter(0, token, rows), rows
    )


class _GatherRows(torch.autograd.Function):
    """Tokens <float>[T, D] to rows <float>[N, D]; backwards every token sums up its rows at once."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, rows: ExpertRows) -> Tensor:
        ctx.rows = rows
        return tokens.index_select(0, rows.token)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # its decorator takes the names away
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None]:
        return sum_by_token(grad_outputs[0], ctx.rows, None), None


class _CombineRows(torch.autograd.Function):
    """Rows <float>[N, D] and their weights <float32>[N] to every token's weighted sum <float>[T,
    D].
    """

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weight: Tensor, rows: ExpertRows) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(outputs, weight)
        return sum_by_token(outputs, rows, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # its decorator takes the names away
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        outputs, weight = ctx.saved_tensors
        d_rows = grad_outputs[0].index_select(0, ctx.rows.token)
        d_weight = torch.linalg.vecdot(d_rows, outputs).to(weight.dtype)
        return d_rows.mul_(weight[:, None].to(d_rows.dtype)), d_weight, None
