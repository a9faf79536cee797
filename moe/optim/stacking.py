"""Small parameters of one shape as one stack, which takes one update instead of many.

Comes after `sharded_parameters`, before `sharded_optimizer`. On an accelerator the update of a small
parameter takes less time than launching its 10 to 50 kernels.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe.kernels.torch_private import copy_each
from moe.optim.sharded_parameters import MatrixSharding, local_gradient, matrix_sharding

MAX_STACKED_ELEMENTS = 2**22
"""Most elements of a parameter that is stacked; larger ones keep an accelerator busy by themselves."""

MAX_STACK_ELEMENTS = 2**24
"""Most elements of a stack, 64 MiB in float32: weights, gradients and state are copied into it."""

State = dict[str, Any]


class PendingUpdate(NamedTuple):
    """A parameter with a gradient.

    Attributes:
        parameter: <float>[..., n, m] the parameter.
        group: Its group of settings.
        sharding: How it is sharded.
        kind: Kind of the parameter, see `parameter_kind`.
    """

    parameter: Tensor
    group: dict[str, Any]
    sharding: MatrixSharding
    kind: str


class Stack(NamedTuple):
    """P parameters of one shape.

    Attributes:
        pending: The update of all of them: <float>[P, ..., n, m] with one batch dimension more.
        state: The state of all of them.
        parameters: The parameters.
        states: Their states.
    """

    pending: PendingUpdate
    state: State
    parameters: list[Tensor]
    states: list[State]

    def save(self) -> None:
        """Writes weights and state back to the parameters."""
        copy_each(self.parameters, self.pending.parameter.unbind())
        for name, value in self.state.items():
            if isinstance(value, Tensor):
                copy_each([state[name] for state in self.states], value.unbind())
            else:
                for state in self.states:
                    state[name] = value


def stack_updates(updates: Sequence[PendingUpdate], states: Sequence[State]) -> Stack:
    """Stacks the updates that `alike` grouped.

    Args:
        updates: P updates.
        states: Their states.
    """
    parameters = [update.parameter for update in updates]
    stacked = torch.stack(parameters).detach()  # [P, ..., n, m]
    stacked.grad = torch.stack([local_gradient(parameter) for parameter in parameters])

    state: State = {}
    for name, value in states[0].items():
        is_tensor = isinstance(value, Tensor)
        state[name] = torch.stack([state[name] for state in states]) if is_tensor else value

    group = updates[0].group
    group = {**group, "batch_dims": group["batch_dims"] + 1}
    sharding = matrix_sharding(stacked, group["batch_dims"])
    pending = PendingUpdate(stacked, group, sharding, updates[0].kind)
    return Stack(pending, state, parameters, list(states))


def alike(
    updates: Iterable[tuple[PendingUpdate, State]],
) -> list[list[tuple[PendingUpdate, State]]]:
    """Returns the updates in lists, each of which can be a stack: small parameters on one device, of
    one shape, kind and group, after equally many steps. All others come alone.

    A parameter without state comes alone, since its shape decides which state it gets.

    Args:
        updates: Updates with the states of their parameters.
    """
    lists: list[list[tuple[PendingUpdate, State]]] = []
    open_lists: dict[Any, list[tuple[PendingUpdate, State]]] = {}
    for update, state in updates:
        parameter = update.parameter
        is_small = parameter.ndim > 0 and parameter.numel() <= MAX_STACKED_ELEMENTS
        if isinstance(parameter, DTensor) or not state or not is_small:
            lists.append([(update, state)])
            continue

        numbers = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        key = (
            id(update.group),
            update.kind,
            parameter.shape,
            parameter.dtype,
            parameter.device,
            tuple(state),
            tuple(numbers.items()),
        )
        members = open_lists.get(key, [])
        if not members or (len(members) + 1) * parameter.numel() > MAX_STACK_ELEMENTS:
            members = open_lists[key] = []
            lists.append(members)
        members.append((update, state))
    return lists
