"""Optimizers by name, as a recipe asks for them: how each is built, and what it costs on a mesh."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moe.distributed.mesh import MeshConfig
from moe.distributed.sharding import Layout
from moe.errors import ConfigError
from moe.optim import adafactor
from moe.registry import Registry


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer that a recipe can name.

    Attributes:
        build: Takes the groups of `parameter_groups`, `clipping_threshold` and `weight_decay`.
        state_elements: Returns the numbers of state that a rank keeps for one parameter.
        summed_elements: Returns the numbers that a rank sums over other ranks in a step for one
            parameter, by the mesh axes over which it sums.
    """

    build: Callable[..., torch.optim.Optimizer]
    state_elements: Callable[[Layout, MeshConfig], int]
    summed_elements: Callable[[Layout, MeshConfig], dict[tuple[str, ...], int]]


OPTIMIZERS: Registry[OptimizerSpec] = Registry("optimizer")


def build_adafactor(
    groups: list[dict[str, Any]],
    *,
    clipping_threshold: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Returns Adafactor, the paper's optimizer.

    Raises:
        ConfigError: When a weight decay is asked for.
    """
    if weight_decay:
        raise ConfigError(
            f"optim.weight_decay is {weight_decay}, but adafactor has none. Set it to 0, or "
            "optim.optimizer to adamw."
        )
    return adafactor.Adafactor(groups, clipping_threshold=clipping_threshold)


def build_adamw(
    groups: list[dict[str, Any]],
    *,
    clipping_threshold: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Returns torch's AdamW.

    Its learning rate is absolute, and `clipping_threshold` is Adafactor's alone.
    """
    # torch would keep `batch_dims` in the group, and in every checkpoint.
    parameters = [{"params": group["params"]} for group in groups]
    return torch.optim.AdamW(parameters, weight_decay=weight_decay)


def _adamw_state_elements(layout: Layout, mesh: MeshConfig) -> int:
    """Returns twice the shard: a first and a second moment of every number."""
    return 2 * math.prod(layout.local_shape(mesh))


def _no_sums(layout: Layout, mesh: MeshConfig) -> dict[tuple[str, ...], int]:
    return {}


OPTIMIZERS.add(
    "adafactor",
    OptimizerSpec(
        build=build_adafactor,
        state_elements=adafactor.state_elements,
        summed_elements=adafactor.summed_elements,
    ),
)
OPTIMIZERS.add(
    "adamw",
    OptimizerSpec(
        build=build_adamw,
        state_elements=_adamw_state_elements,
        summed_elements=_no_sums,
    ),
)
