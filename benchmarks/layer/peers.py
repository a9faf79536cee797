"""The peers: alternatives for a user, over the same weights.

Each builds a variant, or reports why it cannot.
"""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers import OlmoeConfig, SwitchTransformersConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersSparseMLP,
)

from benchmarks.cases import Problem, Variant
from benchmarks.layer.variants import CAPACITY_FACTOR, FeedForward, share_weights

ST_MOE_GROUP = 512  # its one-hot dispatch grows with the square of a group


class UnavailableError(Exception):
    """A peer cannot run a case here; the text says why."""


def hf_grouped_mm(problem: Problem) -> Variant:
    """The `grouped_mm` experts of transformers under OLMoE's router."""
    # The router of a model that has those experts in transformers.
    module = build_olmoe(problem, "grouped_mm")
    forward = partial(run_olmoe, module)
    return _variant("hf_grouped_mm", problem, forward, module, problem.case.rows)


def liger(problem: Problem) -> Variant:
    """The fused experts of Liger-Kernel under OLMoE's router: SwiGLU, for which it has kernels of Triton."""
    _import("liger_kernel")
    _require(problem.case.gated, "only gated experts")
    ALL_EXPERTS_FUNCTIONS["liger"] = run_liger
    module = build_olmoe(problem, "liger")
    forward = partial(run_olmoe, module)
    note = "SwiGLU instead of GEGLU"
    return _variant("liger", problem, forward, module, problem.case.rows, note)


def run_liger(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Returns the output <dtype>[L, D] of Liger's operation, as the interface of transformers calls it."""
    operation = importlib.import_module("liger_kernel.ops").LigerFusedMoEFunction
    weights = (experts.gate_up_proj, experts.down_proj)
    return operation.apply(hidden_states, *weights, top_k_index.int(), top_k_weights)


def build_olmoe(problem: Problem, implementation: str) -> nn.ModuleDict:
    """Returns OLMoE's `router`, and `experts` that a function of transformers runs, over the shared weights."""
    case = problem.case
    config = OlmoeConfig(
        hidden_size=case.d_model,
        intermediate_size=case.d_ff,
        num_experts=case.num_experts,
        num_experts_per_tok=case.num_selected_experts,
        norm_topk_prob=case.num_selected_experts > 1,
    )
    config._experts_implementation = implementation

    # Attributes that the decorator requires of a module of experts: their number and activation.

    @use_experts_implementation(has_gate=case.gated)
    class StackedExperts(nn.Module):
        def __init__(self, config: OlmoeConfig) -> None:
            super().__init__()
            self.num_experts = config.num_experts
            self.act_fn = nn.GELU("tanh") if case.gated else nn.ReLU()

        def forward(
            self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
        ) -> Tensor:
            raise NotImplementedError("the decorator takes the function instead")

    module = nn.ModuleDict({"router": OlmoeTopKRouter(config), "experts": StackedExperts(config)})
    first = "gate_up_proj" if case.gated else "up_proj"
    weights = {
        "router.weight": problem.gate,
        f"experts.{first}": problem.first,
        "experts.down_proj": problem.down,
    }
    share_weights(module, weights)
    return module


def run_olmoe(module: nn.ModuleDict, x: Tensor) -> Tensor:
    """Returns the output <dtype>[1, L, D] of the module of `build_olmoe` for <dtype>[1, L, D]."""
    tokens = rearrange(x, "1 l d -> l d")
    _, weight, index = module["router"](tokens)  # [L, K] each
    return module["experts"](tokens, index, weight)[None]


def hf_switch(problem: Problem) -> Variant:
    """The sparse block of transformers' SwitchTransformers with room for every token."""
    case = problem.case
    _require(case.num_selected_experts == 1, "only one expert for a token")
    _require(not case.gated, "no gated experts")
    config = SwitchTransformersConfig(
        d_model=case.d_model,
        d_ff=case.d_ff,
        num_experts=case.num_experts,
        expert_capacity=case.tokens,
        router_jitter_noise=0.0,
        dropout_rate=0.0,
    )
    with torch.device("meta"):
        module = SwitchTransformersSparseMLP(config)

    # There, each expert is a separate module.
    weights = {"router.classifier.weight": problem.gate}
    for index in range(case.num_experts):
        weights[f"experts.expert_{index}.wi.weight"] = problem.first[index]
        weights[f"experts.expert_{index}.wo.weight"] = problem.down[index]
    share_weights(module, weights)
    return _variant("hf_switch", problem, module, module, case.rows)


def st_moe_pytorch(problem: Problem) -> Variant:
    """The layer of lucidrains' st-moe-pytorch, in groups of 512 tokens.

    Its capacity factor does not count K either.
    """
    case = problem.case
    _require(case.num_selected_experts >= 2, "at least two experts for a token")
    _require(problem.x.dtype == torch.float32, "float32 only")

    # It cannot do without a capacity: it has slots for most of the rows.
    group_size = min(ST_MOE_GROUP, case.tokens)
    factor = CAPACITY_FACTOR * case.num_selected_experts
    capacity = max(int(group_size * factor / case.num_experts), 4)
    num_groups = case.tokens // group_size
    module = _import("st_moe_pytorch").MoE(
        dim=case.d_model,
        num_experts=case.num_experts,
        gating_top_n=case.num_selected_experts,
        threshold_train=0.0,
        threshold_eval=0.0,
        capacity_factor_train=factor,
        capacity_factor_eval=factor,
        experts=nn.ModuleList(_feed_forwards(problem)),
    )

    # Use the shared gate instead of its own.
    module = module.to(problem.x.device)
    module.gate.to_gates.weight = nn.Parameter(problem.gate.detach())

    def forward(x: Tensor) -> Tensor:
        groups = rearrange(x, "1 (g s) d -> g s d", s=group_size)
        return rearrange(module(groups).outputs, "g s d -> 1 (g s) d")

    rows = num_groups * case.num_experts * capacity
    note = f"capacity {factor} in groups of {group_size}"
    return _variant("st_moe_pytorch", problem, forward, module, rows, note)


PEERS: dict[str, Callable[[Problem], Variant]] = {
    "hf_grouped_mm": hf_grouped_mm,
    "liger": liger,
    "hf_switch": hf_switch,
    "st_moe_pytorch": st_moe_pytorch,
}


def build_peer(name: str, problem: Problem) -> Variant:
    """Returns a peer that has run once.

    Raises:
        UnavailableError: When it is not installed, does not do such a case, or fails at it.
    """
    try:
        variant = PEERS[name](problem)
        variant.run("forward_backward")
    except UnavailableError:
        raise
    except Exception as error:
        # If a peer fails, the others are still measured.
        lines = str(error).splitlines() or [""]
        raise UnavailableError(f"failed with {type(error).__name__}: {lines[0]}") from error

    variant.clear()
    return variant


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise UnavailableError(reason)


def _import(name: str) -> Any:
    """Returns an optional module."""
    is_installed = importlib.util.find_spec(name) is not None
    _require(is_installed, f"not installed; pip install {name.replace('_', '-')}")
    module: ModuleType = importlib.import_module(name)
    return module


def _feed_forwards(problem: Problem) -> list[FeedForward]:
    """Returns the experts as modules over the shared weights."""
    pairs = zip(problem.first, problem.down, strict=True)
    return [FeedForward(first, down, problem.case.gated) for first, down in pairs]


def _variant(
    name: str,
    problem: Problem,
    forward: Callable[[Tensor], Tensor],
    module: nn.Module,
    rows: int,
    note: str = "",
) -> Variant:
    """Returns the variant of a module in training mode on the shared input."""
    return Variant(
        name=name,
        forward=forward,
        x=problem.x,
        gradient=problem.gradient,
        parameters=list(module.train().parameters()),
        rows=rows,
        note=note,
    )
