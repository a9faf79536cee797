"""What a checkpoint holds of a model and its optimizer, in a form that is the same on every mesh.

Parameters and buffers stand under their names, the optimizer's state under `optimizer/NAME/KEY`.
Gate and up are apart, as on a mesh; see Layout. DTensors say which part of it all a rank has.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moe.checkpoint.sharded_weights import stored_tensors
from moe.distributed.sharding import Layout

OPTIMIZER = "optimizer/"
_ROWS = "v_row"
"""The one state that has a number for each row of a parameter: the last dimension is summed out."""


def weights_of(model: nn.Module, layouts: Mapping[str, Layout]) -> dict[str, Tensor]:
    """Returns parameters and buffers by name, gate and up apart, in the model's own memory."""
    tensors = stored_tensors(model)
    return {
        name: _apart(x.detach(), layouts[name].shape) if name in layouts else x
        for name, x in tensors.items()
    }


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, layouts: Mapping[str, Layout]
) -> dict[str, Tensor]:
    """Returns the optimizer's state as `optimizer/NAME/KEY`, likewise; numbers as tensors without
    dimensions.

    Call `weights_of` first: only then parameters are those that the optimizer knows.
    """
    found = {}
    for name, parameter in model.named_parameters():
        shape = layouts[name].shape
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                value = torch.tensor(value)
            elif value.shape == parameter.shape:
                value = _apart(value, shape)
            elif key == _ROWS:
                value = _apart(value, shape[:-1])
            found[f"{OPTIMIZER}{name}/{key}"] = value
    return found


def _apart(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns <any>[...] in the shape that it has on a mesh; a view."""
    return x if tuple(x.shape) == shape else x.view(shape)


@contextmanager
def fresh_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: set[str]
) -> Iterator[None]:
    """Gives the optimizer state of exactly the named parameters, to be loaded into; an error puts
    back what it had.

    State that is missing is made by a step of zero gradients at rate zero, which every optimizer
    knows how to take and which changes no weight.
    """
    parameters = dict(model.named_parameters())
    before: dict[Tensor, Any] = {
        p: optimizer.state[p] for p in parameters.values() if p in optimizer.state
    }
    lacking = {p for name, p in parameters.items() if name in names and not before.get(p)}
    if lacking:
        _step_of_nothing(optimizer, lacking)
    for name, parameter in parameters.items():
        if name not in names:
            optimizer.state.pop(parameter, None)
    try:
        yield
    except BaseException:
        for parameter in parameters.values():
            optimizer.state.pop(parameter, None)
        optimizer.state.update(before)
        raise


def put_numbers(
    model: nn.Module, optimizer: torch.optim.Optimizer, loaded: Mapping[str, Tensor]
) -> None:
    """Puts the plain numbers among what was loaded into the optimizer's state; tensors were loaded
    in place.
    """
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                optimizer.state[parameter][key] = type(value)(
                    loaded[f"{OPTIMIZER}{name}/{key}"].item()
                )


def _step_of_nothing(optimizer: torch.optim.Optimizer, parameters: set[nn.Parameter]) -> None:
    """Takes a step of zero gradients at rate zero with these parameters alone."""
    grads = {
        parameter: parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in grads:
        parameter.grad = torch.zeros_like(parameter) if parameter in parameters else None
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    try:
        optimizer.step()
    finally:
        for parameter, grad in grads.items():
            parameter.grad = grad
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
