"""Optimizers by name, as a recipe asks for them."""

from collections.abc import Callable
from typing import Any

import torch

from moe.errors import ConfigError
from moe.optim.adafactor import Adafactor
from moe.registry import Registry

OPTIMIZERS: Registry[Callable[..., torch.optim.Optimizer]] = Registry("optimizer")
"""Makers that take the groups of `parameter_groups`, `clipping_threshold` and `weight_decay`."""


@OPTIMIZERS.register("adafactor")
def adafactor(
    groups: list[dict[str, Any]], *, clipping_threshold: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Returns Adafactor, the paper's.

    Raises:
        ConfigError: When a weight decay is asked for.
    """
    if weight_decay:
        raise ConfigError(
            f"optim.weight_decay is {weight_decay}, but adafactor has none. Set it to 0, or optim.optimizer to adamw."
        )
    return Adafactor(groups, clipping_threshold=clipping_threshold)


@OPTIMIZERS.register("adamw")
def adamw(
    groups: list[dict[str, Any]], *, clipping_threshold: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Returns torch's AdamW; the learning rate is then absolute, and `clipping_threshold` is
    Adafactor's alone.
    """
    return torch.optim.AdamW(
        [{"params": group["params"]} for group in groups], weight_decay=weight_decay
    )
