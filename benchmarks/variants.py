"""The variants of a case: the dense layer, ours, and the peers of peers.py."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases import Problem, Variant
from moe.kernels.cpu_experts import sum_by_token
from moe.sparse.config import SparseConfig
from moe.sparse.dispatch import ExpertRows
from moe.sparse.layer import SparseFeedForward
from moe.sparse.router import RouterInputs
from moe.sparse.stats import router_stats

CAPACITY_FACTOR = 1.25  # the paper's in training; it does not count K, see moe/sparse/capacity.py


class FeedForward(nn.Module):
    """One feed-forward network over weights that somebody else owns."""

    def __init__(self, first: Tensor, down: Tensor, gated: bool) -> None:
        super().__init__()
        self.first, self.down, self.gated = (
            nn.Parameter(first.detach()),
            nn.Parameter(down.detach()),
            gated,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns <dtype>[..., D] of <dtype>[..., D]."""
        hidden = F.linear(x, self.first)
        if self.gated:
            gate, up = hidden.chunk(2, dim=-1)
            return F.linear(F.gelu(gate, approximate="tanh") * up, self.down)
        return F.linear(F.relu(hidden), self.down)


def share_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Replaces the named parameters of a module built on `meta` by leaves over the storage of
    `weights`.
    """
    for path, tensor in weights.items():
        holder, _, name = path.rpartition(".")
        setattr(module.get_submodule(holder), name, nn.Parameter(tensor.detach()))
    tensors = chain(module.named_parameters(), module.named_buffers())
    left = [name for name, tensor in tensors if tensor.is_meta]
    assert not left, f"tensors without a value: {left}"


def dense(problem: Problem) -> Variant:
    """One expert on tokens x K rows: the matrix products of the layer without any routing."""
    case = problem.case
    module = FeedForward(problem.first[0], problem.down[0], case.gated)
    x, gradient = (
        t.detach().repeat(1, case.num_selected_experts, 1) for t in (problem.x, problem.gradient)
    )
    return Variant(
        "dense", module, x.requires_grad_(), gradient, list(module.parameters()), case.rows
    )


def moe_dropless(problem: Problem) -> Variant:
    """Our layer; no token is lost."""
    return _ours("moe_dropless", problem, None, "ragged")


def moe_capacity(problem: Problem) -> Variant:
    """Our layer with a capacity; only rows that got a slot are computed."""
    return _ours("moe_capacity", problem, CAPACITY_FACTOR, "ragged")


def moe_static(problem: Problem) -> Variant:
    """Our layer with a capacity and shapes that do not depend on the data: empty slots are
    computed, too.
    """
    return _ours("moe_static", problem, CAPACITY_FACTOR, "static")


def routing_only(problem: Problem) -> Variant:
    """The dropless layer with experts that hand their rows through: routing, dispatch and combine,
    and nothing else.
    """
    layer = build_layer(problem, None, "ragged")
    layer.register_module("experts", _HandThrough())
    return Variant(
        "routing_only",
        lambda x: layer(x)[0],
        problem.x,
        problem.gradient,
        list(layer.parameters()),
        0,
    )


def stats_of(problem: Problem) -> Callable[[], object]:
    """Returns the making of the statistics of the dropless layer, alone."""
    layer = build_layer(problem, None, "ragged")
    scores = layer.router(RouterInputs(problem.x))
    plan = layer.router.assign(
        scores, torch.ones(problem.x.shape[:2], dtype=torch.bool, device=problem.x.device)
    )
    losses = layer.router.losses(scores, plan)
    return lambda: router_stats(scores, plan, losses)


class _HandThrough(nn.Module):
    """Experts that return what they get."""

    def product_dtype(self) -> torch.dtype:
        return (
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        )

    def forward(self, tokens: Tensor, rows: ExpertRows) -> Tensor:
        return _Rows.apply(tokens, rows.weight, rows)


class _Rows(torch.autograd.Function):
    """Gather and weighted sum, with the reads and writes of the layer's own node in both passes."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, rows: ExpertRows) -> Tensor:
        outputs = tokens.index_select(0, rows.token)
        ctx.save_for_backward(tokens, weight, outputs)
        ctx.rows = rows
        return sum_by_token(outputs, rows, weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        tokens, weight, outputs = ctx.saved_tensors
        d_rows = grad_outputs[0].index_select(0, ctx.rows.token)
        d_weight = torch.linalg.vecdot(d_rows, outputs)
        d_rows *= weight.to(d_rows.dtype)[:, None]
        tokens.index_select(
            0, ctx.rows.token
        )  # for the gradient of the first product, which needs its input
        return sum_by_token(d_rows, ctx.rows, None), d_weight.to(weight.dtype), None


def _ours(
    name: str,
    problem: Problem,
    capacity_factor: float | None,
    dispatch: Literal["ragged", "static"],
) -> Variant:
    """Returns our layer as a variant."""
    layer = build_layer(problem, capacity_factor, dispatch)
    with torch.no_grad():
        stats = layer(problem.x)[1].stats
    rows = int(stats.num_slots if dispatch == "static" else stats.accepted_load.sum())
    variant = Variant(
        name, lambda x: layer(x)[0], problem.x, problem.gradient, list(layer.parameters()), rows
    )
    if capacity_factor is None:
        return variant
    lost = 1 - float(stats.accepted_load.sum()) / problem.case.rows
    return replace(variant, note=f"capacity {capacity_factor} drops {lost:.0%} of the places")


def build_layer(
    problem: Problem, capacity_factor: float | None, dispatch: Literal["ragged", "static"]
) -> SparseFeedForward:
    """Returns our layer over the shared weights."""
    with torch.device("meta"):
        layer = SparseFeedForward(build_config(problem, capacity_factor, dispatch))
    first = "gate_up_proj" if problem.case.gated else "up_proj"
    weights = {
        f"experts.{first}": problem.first,
        "experts.down_proj": problem.down,
        "router.gate": problem.gate,
    }
    share_weights(layer, weights)
    return layer


def build_config(
    problem: Problem, capacity_factor: float | None, dispatch: Literal["ragged", "static"]
) -> SparseConfig:
    """Returns the settings of our layer for a case; every token asks for all its K experts."""
    case = problem.case
    return SparseConfig(
        d_model=case.d_model,
        d_ff=case.d_ff,
        num_experts=case.num_experts,
        num_selected_experts=case.num_selected_experts,
        capacity_factor=capacity_factor,
        eval_capacity_factor=capacity_factor,
        group_size=case.tokens,
        gated=case.gated,
        activation="gelu" if case.gated else "relu",
        dispatch=dispatch,
        router_options={"second_expert_policy": "all", "eval_second_expert_policy": "all"},
    )


OURS: dict[str, Callable[[Problem], Variant]] = {
    build.__name__: build for build in (dense, moe_dropless, moe_capacity, moe_static)
}
