"""The interface by which transformers chooses how experts run.

Comes after experts.py. Our experts can run by a function that transformers has under a name: its own
(`batched_mm`, `grouped_mm`, `sonicmoe`, `deepgemm`) or another that was registered. It takes rows that
are gathered already, each a token with one expert, so that every router, capacity and mesh works as with
our products; a function that gathers tokens itself saves no memory.
"""

from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from moe.checks import check, check_choice
from moe.kernels.expert_weights import ExpertWeights, dequantized
from moe.kernels.hidden_units import ExpertForm
from moe.sparse.config import Activation
from moe.sparse.experts import Experts

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
