"""The interface by which transformers chooses how experts run, both ways.

Our experts can run by a function that transformers has under a name: its own
(`batched_mm`, `grouped_mm`, `sonicmoe`, `deepgemm`) or another that was registered. It takes rows that
are gathered already, each a token with one expert, so that every router, capacity and mesh works as with
our products; a function that gathers tokens itself saves no memory. Under the name `stmoe`, the experts of
its models run by our kernel for a CPU.
"""

from functools import partial
from typing import Any, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from moe.checks import check, check_choice
from moe.kernels.cpu_experts import fused_feed_forward
from moe.kernels.expert_weights import ExpertWeights, dequantized
from moe.kernels.hidden_units import ExpertForm
from moe.sparse.config import Activation
from moe.sparse.dispatch import has_fused_experts, sort_rows
from moe.sparse.experts import Experts
from moe.sparse.plan import DispatchPlan

_ACTIVATIONS = {name: ACT2FN[name] for name in get_args(Activation)}


def set_experts_implementation(module: nn.Module, name: str) -> None:
    """Sets what runs the routed experts of all sparse layers in a module.

    Args:
        module: A model, or a layer.
        name: `eager` for our products, or a name that transformers has for `experts_implementation`.

    Raises:
        ConfigError: When transformers has no such name, or `dispatch` is static.
    """
    check_choice("experts_implementation", name, ["eager", *ALL_EXPERTS_FUNCTIONS])
    function = None if name == "eager" else partial(run_by_interface, name)
    for experts in module.modules():
        if isinstance(experts, Experts):
            runs = function is None or experts.config.dispatch == "ragged"
            check(runs, "experts_implementation", name, "'eager' with dispatch 'static'")
            experts.run_elsewhere = function


class ExpertsByName:
    """Put before a class of transformers: its `experts_implementation` says what runs our experts."""

    config: Any

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """Returns what runs the experts; `set_experts_implementation` checks the name."""
        return requested_experts or "eager"

    def set_experts_implementation(self, experts_implementation: Any) -> None:
        """Sets what runs the experts; see the function of this name."""
        set_experts_implementation(cast(nn.Module, self), experts_implementation)
        self.config._experts_implementation = experts_implementation


class _Config(NamedTuple):
    hidden_act: str


@use_experts_implementation  # pyright: ignore[reportArgumentType]  # no Module: shards are not leaves
class _StackedExperts:
    """Our experts, with the attributes that functions of the interface read."""

    forward = nn.Module.forward  # which the decorator replaces

    def __init__(self, config: _Config, first: Tensor, down: Tensor) -> None:
        self.num_experts = down.shape[0]
        self.gate_up_proj = self.up_proj = first
        self.down_proj = down
        self.act_fn = _ACTIVATIONS[config.hidden_act]


def run_by_interface(
    name: str, x: Tensor, expert: Tensor, weights: ExpertWeights, form: ExpertForm
) -> Tensor:
    """Returns the outputs of rows <float>[N, D] by a function of transformers.

    Args:
        name: Its name.
        x: <float>[N, D].
        expert: <int64>[N] expert of each row; E for none, whose outputs are undefined.
        weights: The experts' weights.
        form: What an expert computes.

    Raises:
        ConfigError: When an expert is more than two products, an activation and a gate.
    """
    is_plain = not form.dropout_rate and all(extra is None for extra in weights[2:])
    expected = "'eager' for experts with biases, adapters or (in training) dropout"
    check(is_plain, "experts_implementation", name, expected)

    # In one dtype, which may be wider than that of weights that were to be converted one by one.
    dtype = torch.promote_types(x.dtype, weights.down.dtype)
    first, down = [dequantized(weight).to(dtype) for weight in weights[:2]]
    experts: Any = _StackedExperts(_Config(form.activation), first, down)
    experts.has_gate = form.gated

    # The interface has the index E for experts on other ranks. Rows of padding may hold NaN.
    experts._is_expert_parallel = True
    x = x.to(dtype).masked_fill(expert[:, None] == len(down), 0)
    return ALL_EXPERTS_FUNCTIONS[name](experts, x, expert[:, None], x.new_ones(len(x), 1))


@torch.compiler.disable()
def run_stmoe(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Returns every token's weighted sum of the outputs of a model's experts, by our kernel for a CPU.

    Args:
        module: Experts of a model of transformers.
        hidden_states: <float>[T, D].
        top_k_index: <int64>[T, K]; E or more is no expert.
        top_k_weights: <float>[T, K].

    Returns:
        <dtype of hidden_states>[T, D].

    Raises:
        ConfigError: When an expert is more than two products, an activation and a gate, or not on a CPU.
    """
    act_class = type(getattr(module, "act_fn", None))
    names = [name for name, act_fn in _ACTIVATIONS.items() if type(act_fn) is act_class]
    gates = {type(module)._apply_gate, vars(_StackedExperts)["_apply_gate"]}
    is_other = module.has_bias or module.is_transposed or not module.is_concatenated
    is_other = is_other or getattr(module, "has_post_expert_norm", False)
    is_ours = len(names) == len(gates) == 1 and not is_other and has_fused_experts(hidden_states)
    expected = f"another for {type(module).__name__} on {hidden_states.device.type}"
    check(is_ours, "experts_implementation", "stmoe", expected)

    form = ExpertForm(names[0], module.has_gate, "none", 0.0)
    first = module.gate_up_proj if form.gated else module.up_proj
    weights = ExpertWeights(first, module.down_proj, None)

    # All tokens are one group.
    index = top_k_index[None]  # [1, T, K]
    accepted = index < module.num_experts
    weight = top_k_weights[None]
    plan = DispatchPlan(index, index, accepted, weight, accepted, accepted[..., 0], None)
    rows = sort_rows(plan, module.num_experts)
    output = fused_feed_forward(hidden_states.to(first.dtype), rows, weights, form)
    return output.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register("stmoe", run_stmoe)
