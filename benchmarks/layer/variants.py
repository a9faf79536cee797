"""The variants of a case: the dense layer and our layers; other libraries' layers are in peers.py."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases import Problem, Variant
from moe.sparse.config import SparseConfig
from moe.sparse.layer import SparseFeedForward

CAPACITY_FACTOR = 1.25  # the paper's in training; it does not count K, see moe/sparse/capacity.py

DispatchForm = Literal["ragged", "static"]


class FeedForward(nn.Module):
    """One feed-forward network over weights that are shared with other variants."""

    def __init__(self, first: Tensor, down: Tensor, gated: bool) -> None:
        super().__init__()
        self.first = nn.Parameter(first.detach())
        self.down = nn.Parameter(down.detach())
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        """Returns <dtype>[..., D] of <dtype>[..., D]."""
        # GEGLU, or a plain ReLU.
        hidden = F.linear(x, self.first)  # [..., 2F or F]
        if not self.gated:
            return F.linear(F.relu(hidden), self.down)

        gate, up = hidden.chunk(2, dim=-1)
        return F.linear(F.gelu(gate, approximate="tanh") * up, self.down)


def share_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Replaces parameters of a module on `meta` by leaves over the storage of `weights`.

    Args:
        module: Built on the meta device.
        weights: Tensors by the name of the parameter that they replace.
    """
    for path, tensor in weights.items():
        owner, _, name = path.rpartition(".")
        setattr(module.get_submodule(owner), name, nn.Parameter(tensor.detach()))

    tensors = chain(module.named_parameters(), module.named_buffers())
    without_value = [name for name, tensor in tensors if tensor.is_meta]
    assert not without_value, f"tensors without a value: {without_value}"


def dense(problem: Problem) -> Variant:
    """One expert on tokens x K rows: the matrix products of the layer without any routing."""
    case = problem.case
    module = FeedForward(problem.first[0], problem.down[0], case.gated)

    # Every token K times.
    repeats = (1, case.num_selected_experts, 1)
    x = problem.x.detach().repeat(repeats)
    gradient = problem.gradient.detach().repeat(repeats)
    return Variant(
        name="dense",
        forward=module,
        x=x.requires_grad_(),
        gradient=gradient,
        parameters=list(module.parameters()),
        rows=case.rows,
    )


def moe_dropless(problem: Problem) -> Variant:
    """Our layer; no token is lost."""
    return _our_variant("moe_dropless", problem, None, "ragged")


def moe_capacity(problem: Problem) -> Variant:
    """Our layer with a capacity; only rows that got a slot are computed."""
    return _our_variant("moe_capacity", problem, CAPACITY_FACTOR, "ragged")


def moe_static(problem: Problem) -> Variant:
    """Our layer with a capacity and shapes that do not depend on the data.

    Empty slots are computed, too.
    """
    return _our_variant("moe_static", problem, CAPACITY_FACTOR, "static")


def moe_unreported(problem: Problem) -> Variant:
    """Our layer without losses and statistics, as in generation; no token is lost."""
    layer = build_layer(problem, None, "ragged")
    variant = _layer_variant("moe_unreported", layer, problem, problem.case.rows)
    return replace(variant, forward=lambda x: layer(x, report=False)[0])


def moe_compiled(problem: Problem) -> Variant:
    """The same, compiled into one graph."""
    variant = moe_unreported(problem)
    compiled = torch.compile(variant.forward, fullgraph=True)
    return replace(variant, name="moe_compiled", forward=compiled)


def _our_variant(
    name: str, problem: Problem, capacity_factor: float | None, dispatch: DispatchForm
) -> Variant:
    # How many rows the experts compute depends on the plan.
    layer = build_layer(problem, capacity_factor, dispatch)
    with torch.no_grad():
        stats = layer(problem.x)[1].stats

    num_rows = stats.num_slots if dispatch == "static" else stats.accepted_load.sum()
    variant = _layer_variant(name, layer, problem, int(num_rows))
    if capacity_factor is None:
        return variant

    fraction_dropped = 1 - float(stats.accepted_load.sum()) / problem.case.rows
    note = f"capacity {capacity_factor} drops {fraction_dropped:.0%} of the choices"
    return replace(variant, note=note)


def _layer_variant(name: str, layer: SparseFeedForward, problem: Problem, rows: int) -> Variant:
    def forward(x: Tensor) -> Tensor:
        return layer(x)[0]

    return Variant(
        name=name,
        forward=forward,
        x=problem.x,
        gradient=problem.gradient,
        parameters=list(layer.parameters()),
        rows=rows,
    )


def build_layer(
    problem: Problem, capacity_factor: float | None, dispatch: DispatchForm
) -> SparseFeedForward:
    """Returns our layer over the shared weights."""
    # Its own weight is never allocated.
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
    problem: Problem, capacity_factor: float | None, dispatch: DispatchForm
) -> SparseConfig:
    """Returns the settings of our layer for a case; every token requests all K of its experts."""
    # All tokens are one group; no policy drops a choice, so that rows can be counted.
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
        activation="gelu_pytorch_tanh" if case.gated else "relu",
        dispatch=dispatch,
        router_options={"second_expert_policy": "all", "eval_second_expert_policy": "all"},
    )


OURS: dict[str, Callable[[Problem], Variant]] = {
    "dense": dense,
    "moe_dropless": moe_dropless,
    "moe_capacity": moe_capacity,
    "moe_static": moe_static,
}

ON_REQUEST: dict[str, Callable[[Problem], Variant]] = {
    "moe_unreported": moe_unreported,
    "moe_compiled": moe_compiled,
}
"""Measured only on request: one matters on a GPU, and the other first compiles for half a minute."""
