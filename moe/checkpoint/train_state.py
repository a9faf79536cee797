"""The train state of a checkpoint: tensors of model and optimizer, with the same names on every
mesh.

Parameters and buffers have their own names, the optimizer's state has `optimizer/NAME/KEY`. Gate and
up are apart, as on a mesh; see Layout. DTensors determine the part of a tensor on a rank.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moe.checkpoint.sharded_weights import stored_tensors
from moe.distributed.sharding import Layout, local_shard
from moe.kernels.quantized_weight import QuantizedWeight
from moe.models.adapter_files import is_adapter

OPTIMIZER = "optimizer/"

# The only optimizer state with a number for each row of a parameter: Adafactor's second moments,
# summed over the last dimension.
_ROW_STATE = "v_row"


def model_tensors(model: nn.Module, layouts: Mapping[str, Layout]) -> dict[str, Tensor]:
    """Returns parameters and buffers <any>[...] by name, gate and up separate, in the model's memory.

    Of a model with adapters these are the adapters alone. Quantized weights are left out, since they
    never change.
    """
    stored = {n: x for n, x in stored_tensors(model).items() if not isinstance(x, QuantizedWeight)}
    adapters = {name: tensor for name, tensor in stored.items() if is_adapter(name)}
    tensors = {}
    for name, tensor in (adapters or stored).items():
        if name in layouts:
            tensor = _unpack(tensor.detach(), layouts[name].shape)
        tensors[name] = tensor
    return tensors


def optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, layouts: Mapping[str, Layout]
) -> dict[str, Tensor]:
    """Returns the optimizer's state <any>[...] as `optimizer/NAME/KEY`; numbers as <any>[].

    Call `model_tensors` first: only then are the parameters the ones that the optimizer holds.
    """
    tensors = {}
    for name, parameter in model.named_parameters():
        shape = layouts[name].shape
        for key, value in optimizer.state.get(parameter, {}).items():
            # Second moments have the shape of the parameter, or of its rows or columns.
            if not isinstance(value, Tensor):
                value = torch.tensor(value)
            elif value.shape == parameter.shape:
                value = _unpack(value, shape)
            elif key == _ROW_STATE:
                value = _unpack(value, shape[:-1])
            tensors[f"{OPTIMIZER}{name}/{key}"] = value
    return tensors


def parameter_of(key: str) -> str:
    """Returns the parameter of a checkpoint's entry `optimizer/NAME/KEY`.

    An empty string for other entries.
    """
    return key.split("/")[1] if key.startswith(OPTIMIZER) else ""


def prepare_state(model: nn.Module, optimizer: torch.optim.Optimizer, names: set[str]) -> None:
    """Ensures that the optimizer has state for exactly the named parameters, as a target for loading.

    Missing state is created by a step with zero gradients at rate zero, which works for every
    optimizer and changes no weight. Gradients are removed.
    """
    without_state: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if name not in names:
            optimizer.state.pop(parameter, None)
        elif not optimizer.state.get(parameter):
            without_state.append(parameter)
    if not without_state:
        return

    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.zero_grad()
    for parameter in without_state:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def set_numbers(
    model: nn.Module, optimizer: torch.optim.Optimizer, loaded: Mapping[str, Tensor]
) -> None:
    """Sets the plain numbers of the optimizer's state from <any>[]; tensors are loaded in place."""
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if not isinstance(value, Tensor):
                number = loaded[f"{OPTIMIZER}{name}/{key}"].item()
                state[key] = type(value)(number)


# Without a file: a replica group that comes back takes the state from one that is alive, rank by
# rank of the same mesh.


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
    """Loads the result of `live_state` on the same rank of an equal mesh.

    Args:
        state: <any>[...] by name.
        model: Model of the same configuration.
        optimizer: Optimizer of its parameters, before the first step or after.
        layouts: Layout of each parameter.
    """
    weights = model_tensors(model, layouts)
    with_state = {parameter_of(name) for name in state if name.startswith(OPTIMIZER)}
    prepare_state(model, optimizer, with_state)
    numbers = optimizer_tensors(model, optimizer, layouts)
    targets = {**weights, **numbers}
    assert targets.keys() == state.keys(), "groups of one recipe have the same tensors"
    for name, target in targets.items():
        local_shard(target).copy_(state[name])
    set_numbers(model, optimizer, numbers)


def _unpack(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns <any>[...] in its shape on a mesh, gate and up apart; a view."""
    return x if tuple(x.shape) == shape else x.view(shape)
