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
        build: Takes the groups of `parameter_groups`, `clipping_threshold`, `weight_decay`, and
            options by name.
        state_elements: Returns the numbers of state that a rank keeps for one parameter. It and
            `summed_elements` take the options that a recipe gives by name, too.
        summed_elements: Returns the numbers that a rank sums over other ranks in a step for one
            parameter, by the mesh axes over which it sums.
        options_of: Its keywords but `RESERVED` are the options; None if same as for `build`.
    """

    build: Callable[..., torch.optim.Optimizer]
    state_elements: Callable[..., int]
    summed_elements: Callable[..., dict[tuple[str, ...], int]]
    options_of: Callable[..., Any] | None = None

    def option_names(self) -> list[str]:
        """Returns the names of the options."""
        return option_names(self.options_of or self.build, RESERVED)


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
    check_options(place, name, spec.options_of or spec.build, options, RESERVED)

    # Building the optimizer for a single number checks the options as for a model.
    number = torch.nn.Parameter(torch.zeros(1, 1))
    groups = [{"params": [number], "batch_dims": 0, "kinds": [WEIGHT]}]
    try:
        spec.build(
            groups, clipping_threshold=clipping_threshold, weight_decay=weight_decay, **options
        )
    except ConfigError as error:
        if str(error).startswith("optim."):
            raise
        raise ConfigError(f"{place}: {error}") from error


def build_adafactor(
    groups: list[dict[str, Any]], *, clipping_threshold: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Returns Adafactor, the paper's optimizer.

    Raises:
        ConfigError: When a weight decay is set.
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
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
) -> torch.optim.Optimizer:
    """Returns torch's AdamW, as one pass over a parameter and its moments.

    Its learning rate is absolute, and `clipping_threshold` is Adafactor's alone.

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


def _without_clipping(
    name: str, optimizer: Callable[..., torch.optim.Optimizer]
) -> Callable[..., torch.optim.Optimizer]:
    """Returns a builder of an optimizer with the options of its class, which does not support clipping."""

    def build(
        groups: list[dict[str, Any]],
        *,
        clipping_threshold: float,
        weight_decay: float,
        **options: Any,
    ) -> torch.optim.Optimizer:
        if clipping_threshold != 1.0:
            raise ConfigError(
                f"optim.clipping_threshold is {clipping_threshold}, but {name} has none: its step "
                "is bounded. Leave it at 1.0, or set optim.max_grad_norm."
            )
        return optimizer(groups, weight_decay=weight_decay, **options)

    return build


def _moments(layout: Layout, mesh: MeshConfig, *, num_moments: int, **options: Any) -> int:
    return num_moments * math.prod(layout.local_shape(mesh))


def _no_sums(layout: Layout, mesh: MeshConfig, **options: Any) -> dict[tuple[str, ...], int]:
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
        build=build_adamw, state_elements=partial(_moments, num_moments=2), summed_elements=_no_sums
    ),
)
OPTIMIZERS.add(
    "lamb",
    OptimizerSpec(
        build=_without_clipping("lamb", LAMB),
        state_elements=partial(_moments, num_moments=2),
        summed_elements=partial(summed_norms, num_norms=3),  # |w|, |u| and |g|
        options_of=LAMB,
    ),
)
OPTIMIZERS.add(
    "lars",
    OptimizerSpec(
        build=_without_clipping("lars", LARS),
        state_elements=partial(_moments, num_moments=1),
        summed_elements=partial(summed_norms, num_norms=2),  # |w| and |g|
        options_of=LARS,
    ),
)
OPTIMIZERS.add(
    "muon",
    OptimizerSpec(
        build=_without_clipping("muon", muon.Muon),
        state_elements=muon.state_elements,
        summed_elements=muon.summed_elements,
        options_of=muon.Muon,
    ),
)
