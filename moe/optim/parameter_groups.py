"""Parameters in groups for an optimizer: stacks of experts, and the kind of each parameter."""

import re
from typing import Any

from torch import nn

_PROJECTIONS = ("experts.gate_up_proj", "experts.up_proj", "experts.down_proj")

EXPERT_STACKS = (*_PROJECTIONS, *[f"{name}_bias" for name in _PROJECTIONS], "experts.bias")
"""Endings of the names of parameters whose first dimension counts experts."""

WEIGHT = "weights"
"""Kind of every parameter that has no other kind."""

EMBEDDING = "embeddings"
"""Kind of the tables of tokens, at the input and at the output."""

SPECIAL_KINDS = ("norms", "biases", "router")
"""Kinds of parameters that an optimizer may treat apart."""

_TOKEN_TABLE = re.compile(r"embed|\bshared\.|\b(lm_)?head\b")


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns the trainable parameters in two groups, with experts separate; empty groups are
    omitted.

    Args:
        model: Any module; stacked experts are known by their names, `EXPERT_STACKS`.

    Returns:
        Groups with `params`, `batch_dims`: 1 for stacked experts, else 0, and `kinds`: the kind of
        each parameter, see `parameter_kind`.
    """
    dense: dict[str, Any] = {"params": [], "batch_dims": 0, "kinds": []}
    stacked: dict[str, Any] = {"params": [], "batch_dims": 1, "kinds": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_stack = name.endswith(EXPERT_STACKS) and "shared_experts." not in name
            group = stacked if is_stack else dense
            matrix_dims = parameter.ndim - group["batch_dims"]
            group["params"].append(parameter)
            group["kinds"].append(parameter_kind(name, matrix_dims))

    return [group for group in (dense, stacked) if group["params"]]


def parameter_kind(name: str, matrix_dims: int) -> str:
    """Returns `norms`, `biases`, `router`, `embeddings` or `weights`.

    Args:
        name: Name of a parameter, or of its rule on a mesh. A name with `bias` is a bias, including
            tables of position biases; a name with `router` is a router.
        matrix_dims: Dimensions other than those that only stack parameters. Every other vector is a
            norm.
    """
    if "bias" in name:
        return "biases"
    if "router" in name:
        return "router"
    if matrix_dims < 2:
        return "norms"
    return EMBEDDING if _TOKEN_TABLE.search(name) else WEIGHT
