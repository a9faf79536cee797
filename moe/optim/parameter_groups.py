"""Which parameters are stacks of experts: the groups that Adafactor is built from."""

from typing import Any

from torch import nn

EXPERT_STACKS = (
    "experts.gate_up_proj",
    "experts.up_proj",
    "experts.down_proj",
    "experts.bias",
)
"""Endings of the names of parameters whose first dimension counts experts."""


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns the trainable parameters in two groups, experts apart; an empty group is left out.

    Args:
        model: Any module; stacked experts are known by their names, `EXPERT_STACKS`.

    Returns:
        Groups with `params` and `batch_dims`: 1 for stacked experts, else 0.
    """
    dense: list[nn.Parameter] = []
    stacked: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = stacked if name.endswith(EXPERT_STACKS) else dense
            group.append(parameter)

    groups: list[dict[str, Any]] = []
    if dense:
        groups.append({"params": dense, "batch_dims": 0})
    if stacked:
        groups.append({"params": stacked, "batch_dims": 1})
    return groups
