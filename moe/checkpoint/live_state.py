"""The train state of a running model as tensors of this rank, for another that is to go on with it.

The checkpoint's names and shapes (train_state.py), without a file: a replica group that comes back
takes it from one that lived on, rank by rank of the same mesh.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moe.checkpoint.train_state import (
    OPTIMIZER,
    fresh_state,
    model_tensors,
    optimizer_tensors,
    parameter_of,
    set_numbers,
)
from moe.distributed.sharding import Layout, local_shard


def live_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, layouts: Mapping[str, Layout]
) -> dict[str, Tensor]:
    """Returns this rank's shards <any>[...] of weights and optimizer state by name; no copies."""
    tensors = {**model_tensors(model, layouts), **optimizer_tensors(model, optimizer, layouts)}
    return {name: local_shard(tensor).detach() for name, tensor in tensors.items()}


@torch.no_grad()
def load_live_state(
    state: Mapping[str, Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    layouts: Mapping[str, Layout],
) -> None:
    """Copies what `live_state` returned on the same rank of an equal mesh.

    Args:
        state: <any>[...] by name.
        model: Of the same configuration.
        optimizer: Optimizer of its parameters, before the first step or after.
        layouts: Where each parameter lies.
    """
    weights = model_tensors(model, layouts)
    with_state = {parameter_of(name) for name in state if name.startswith(OPTIMIZER)}
    with fresh_state(model, optimizer, with_state):
        numbers = optimizer_tensors(model, optimizer, layouts)
        targets = {**weights, **numbers}
        assert targets.keys() == state.keys(), "groups of one recipe have the same tensors"
        for name, target in targets.items():
            local_shard(target).copy_(state[name])
    set_numbers(model, optimizer, numbers)
