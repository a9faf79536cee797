"""Optimizers by name, as recipes request them: how each is built, and its cost on a mesh."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from moe.checks import check_number
from moe.distributed.mesh import MeshConfig
from moe.distributed.sharding import Layout
from moe.errors import ConfigError
from moe.optim import adafactor, muon
from moe.optim.lamb import LAMB
from moe.optim.lars import LARS
from moe.optim.options import check_options, option_names
from moe.optim.parameter_groups import WEIGHT
from moe.optim.trust_ratio import summed_norms
from moe.registry import Registry

RESERVED = frozenset({"lr", "clipping_threshold", "weight_decay"})
"""Keywords of optimizers that recipes have keys of their own for; all others are options."""


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer that a recipe can name.

    Attributes:
        optimizer: Class or function that takes the groups of `parameter_groups` and keywords:
            `clipping_threshold` and `weight_decay` if it has them, and its options.
        state_elements: Returns the numbers of state that a rank keeps for one parameter. It and
            `summed_elements` take the options that a recipe gives by name, too.
        summed_elements: Returns the numbers that a rank sums over other ranks in a step for one
            parameter, by the mesh axes over which it sums.
    """

    optimizer: Callable[..., torch.optim.Optimizer]
    state_elements: Callable[..., int]
    summed_elements: Callable[..., dict[tuple[str, ...], int]]

    def option_names(self) -> list[str]:
        """Returns the names of the options."""
        return option_names(self.optimizer, RESERVED)

    def build(
        self,
        groups: list[dict[str, Any]],
        *,
        clipping_threshold: float,
        weight_decay: float,
        **options: Any,
    ) -> torch.optim.Optimizer:
        """Returns the optimizer; settings that it does not have are left out.

        Args:
            groups: Result of `parameter_groups`.
            clipping_threshold: See `OptimRecipe`.
            weight_decay: See `OptimRecipe`.
            options: Options by name.
        """
        settings = {"clipping_threshold": clipping_threshold, "weight_decay": weight_decay}
        known = option_names(self.optimizer, ())
        settings = {name: value for name, value in settings.items() if name in known}
        return self.optimizer(groups, **settings, **options)


OPTIMIZERS: Registry[OptimizerSpec] = Registry("optimizer")


def check_optimizer(
    name: str, *, clipping_threshold: float, weight_decay: float, options: Mapping[str, Any]
) -> None:
    """Raises a ConfigError unless an optimizer can be built with these settings of a recipe.

    Args:
        name: A name in OPTIMIZERS.
        clipping_threshold: Setting of that name.
        weight_decay: Setting of that name.
        options: Options by name.
    """
    place = "optim.optimizer_options"
    spec = OPTIMIZERS.get(name)
    check_options(place, name, spec.optimizer, options, RESERVED)

    # Settings with keys of their own, and the values that every optimizer takes.
    settings = {"clipping_threshold": clipping_threshold, "weight_decay": weight_decay}
    neutral = {"clipping_threshold": 1.0, "weight_decay": 0.0}
    known = option_names(spec.optimizer, ())
    for key, value in settings.items():
        if value != neutral[key] and key not in known:
            raise ConfigError(
                f"optim.{key} is {value}, but {name} has none. Leave it at {neutral[key]}, or choose another "
                "optim.optimizer."
            )

    # Building the optimizer for a single number checks the options as for a model.
    number = torch.nn.Parameter(torch.zeros(1, 1))
    groups = [{"params": [number], "batch_dims": 0, "kinds": [WEIGHT]}]
    try:
        spec.build(groups, **settings, **options)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def build_adafactor(
    groups: list[dict[str, Any]], *, clipping_threshold: float
) -> torch.optim.Optimizer:
    """Returns Adafactor, the paper's optimizer, with the settings that the planner knows."""
    return adafactor.Adafactor(groups, clipping_threshold=clipping_threshold)


def build_adamw(
    groups: list[dict[str, Any]],
    *,
    weight_decay: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
) -> torch.optim.Optimizer:
    """Returns torch's AdamW, as one pass over a parameter and its moments.

    Its learning rate is absolute.

    Raises:
        ConfigError: When an option is out of range.
    """
    check_number("beta1 of adamw", beta1, least=0, below=1)
    check_number("beta2 of adamw", beta2, least=0, below=1)
    check_number("epsilon of adamw", epsilon, least=0)

    # torch would keep `batch_dims` in the group, and in every checkpoint. Its fused operation does
    # not take shards and whole parameters together, and a mesh of `tp` alone has both.
    parameters: list[dict[str, Any]] = []
    for group in groups:
        shards = [p for p in group["params"] if isinstance(p, DTensor)]
        whole = [p for p in group["params"] if not isinstance(p, DTensor)]
        parameters += [{"params": part} for part in (whole, shards) if part]
    return torch.optim.AdamW(
        parameters, betas=(beta1, beta2), eps=epsilon, weight_decay=weight_decay, fused=True
    )


def _moments(layout: Layout, mesh: MeshConfig, *, num_moments: int, **options: Any) -> int:
    return num_moments * math.prod(layout.local_shape(mesh))


def _no_sums(layout: Layout, mesh: MeshConfig, **options: Any) -> dict[tuple[str, ...], int]:
    return {}


OPTIMIZERS.add(
    "adafactor", OptimizerSpec(build_adafactor, adafactor.state_elements, adafactor.summed_elements)
)
OPTIMIZERS.add("adamw", OptimizerSpec(build_adamw, partial(_moments, num_moments=2), _no_sums))
OPTIMIZERS.add(
    "lamb",  # the norms of w, u and g
    OptimizerSpec(LAMB, partial(_moments, num_moments=2), partial(summed_norms, num_norms=3)),
)
OPTIMIZERS.add(
    "lars",  # the norms of w and g
    OptimizerSpec(LARS, partial(_moments, num_moments=1), partial(summed_norms, num_norms=2)),
)
OPTIMIZERS.add("muon", OptimizerSpec(muon.Muon, muon.state_elements, muon.summed_elements))
