"""Which parameters are stacks of experts: the groups that Adafactor is built from."""

from typing import Any

from torch import nn

EXPERT_STACKS = ("experts.gate_up_proj", "experts.up_proj", "experts.down_proj", "experts.bias")
"""Endings of the names of parameters whose first dimension counts experts."""


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns the trainable parameters in two groups, experts apart; an empty group is left out.

    Args:
        model: Any module; stacked experts are known by their names, `EXPERT_STACKS`.

    Returns:
        Groups with `params` and `batch_dims`: 1 for stacked experts, else 0.
    """
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    stacked = [p for name, p in trainable if name.endswith(EXPERT_STACKS)]
    others = [p for name, p in trainable if not name.endswith(EXPERT_STACKS)]
    groups = [{"params": others, "batch_dims": 0}, {"params": stacked, "batch_dims": 1}]
    return [group for group in groups if group["params"]]
