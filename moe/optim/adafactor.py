"""Adafactor as T5X runs it: factored second moments, update clipping, steps relative to the parameter's size."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from moe.errors import ConfigError


class Adafactor(torch.optim.Optimizer):
    """Adafactor without momentum and weight decay, whose expert axis is a batch axis.

    A parameter group may hold `batch_dims: n`: the first n dimensions then count separate parameters that are
    stored together (stacked experts). Moments, clipping and scale are taken within each of them, so that one
    expert's gradient never changes another's step. Set `group["lr"]` before each step; the schedule is the caller's.

    Moments are kept in float32 (float64 for float64 parameters), whatever the dtype of the parameters.

    Args:
        params: Parameters or groups of them, see `parameter_groups`.
        lr: Step relative to RMS(parameter): 0.01 changes a parameter by up to 1 % a step.
        decay_exponent: Second-moment decay at step t = 0, 1, ... is 1 - (t + 1)^-decay_exponent; larger remembers
            longer.
        clipping_threshold: Largest RMS of an update before `lr` and scale; smaller damps spikes and learning.
        min_dim_size_to_factor: A matrix is factored when both its dimensions reach this. Stacked matrices
            (`batch_dims` of 1 or more) are always factored: there the rule is explicit.
        epsilon1: Added to the squared gradient, so that a zero gradient divides by no zero.
        epsilon2: Least scale of a parameter; keeps a parameter of zeros learning.

    Raises:
        ConfigError: When a value is out of range or a parameter has more than 2 dimensions beside its batch ones.

    Source:
        Adafactor (arXiv:1804.04235); google-research/t5x t5x/adafactor.py at 0eb60a642d. Differs: rows are the
        second-last and columns the last dimension, not the smaller and the larger (the factors are symmetric, so
        this changes nothing); each parameter counts its own steps, so that one that joins late starts fresh.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.01,
        decay_exponent: float = 0.8,
        clipping_threshold: float = 1.0,
        min_dim_size_to_factor: int = 128,
        epsilon1: float = 1e-30,
        epsilon2: float = 1e-3,
    ) -> None:
        settings = {
            "lr": lr,
            "decay_exponent": decay_exponent,
            "clipping_threshold": clipping_threshold,
            "min_dim_size_to_factor": min_dim_size_to_factor,
            "epsilon1": epsilon1,
            "epsilon2": epsilon2,
        }
        for name, value in settings.items():
            if not 0 <= value < math.inf or (
                value == 0 and name in ("decay_exponent", "clipping_threshold", "epsilon1")
            ):
                bound = "0 or more" if name in ("lr", "epsilon2", "min_dim_size_to_factor") else "above 0"
                raise ConfigError(f"Adafactor's {name} is {value!r}; expected a finite number {bound}.")
        super().__init__(params, {**settings, "batch_dims": 0})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group after checking that each of its parameters is a stack of scalars, vectors or matrices.

        Raises:
            ConfigError: When a parameter has more than 2 dimensions beside its batch ones, or none.
        """
        super().add_param_group(param_group)
        batch_dims = self.param_groups[-1]["batch_dims"]
        for parameter in self.param_groups[-1]["params"]:
            own_dims = parameter.ndim - batch_dims
            if own_dims > 2 or own_dims < min(1, batch_dims):
                raise ConfigError(
                    f"Adafactor got a parameter of shape {tuple(parameter.shape)} in a group with batch_dims "
                    f"{batch_dims}: {own_dims} dimensions are left, expected a vector or a matrix. Put it into a "
                    "group whose batch_dims counts the dimensions that only stack separate parameters."
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """Updates every parameter that has a gradient; the others, and their moments, stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state as it was saved.

        The base class casts moments to the dtype of the parameters, which would lose them under bfloat16: here
        they keep the dtype that they were saved in.
        """
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():
            parameter = parameters[index]
            self.state[parameter] = {
                name: value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
                for name, value in saved.items()
            }

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Takes one step on one parameter."""
        state = self.state[parameter]
        if not state:
            state.update(_initial_state(parameter, group))
        precise = _moment_dtype(parameter)
        assert parameter.grad is not None, "step() updates only parameters with a gradient"
        value, grad = parameter.to(precise), parameter.grad.to(precise)

        mixing_rate = (state["step"] + 1.0) ** -group["decay_exponent"]
        normalise = _normalise_factored if "v_row" in state else _normalise
        update = normalise(grad, state, mixing_rate, group["epsilon1"])
        state["step"] += 1

        own_dims = tuple(range(group["batch_dims"], parameter.ndim))
        scale = _rms(value, own_dims).clamp_(min=group["epsilon2"])
        clipping = _rms(update, own_dims).div_(group["clipping_threshold"]).clamp_(min=1.0)
        value.addcmul_(update, scale.div_(clipping), value=-group["lr"])
        if value is not parameter:
            parameter.copy_(value)


def _moment_dtype(parameter: Tensor) -> torch.dtype:
    """Returns float32, or float64 for a float64 parameter."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _initial_state(parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
    """Returns step 0 and zero moments: `v_row` and `v_col` when the parameter is factored, else `v`."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=_moment_dtype(parameter), device=parameter.device)

    shape, batch_dims = parameter.shape, group["batch_dims"]
    is_matrix = len(shape) - batch_dims == 2
    if is_matrix and (batch_dims > 0 or min(shape) >= group["min_dim_size_to_factor"]):
        return {"step": 0, "v_row": zeros(*shape[:-1]), "v_col": zeros(*shape[:-2], shape[-1])}
    return {"step": 0, "v": zeros(*shape)}


def _normalise(grad: Tensor, state: dict[str, Any], mixing_rate: float, epsilon: float) -> Tensor:
    """Mixes <float>[...] grad^2 into `v` and returns grad / sqrt(v)."""
    state["v"].lerp_(grad.square().add_(epsilon), mixing_rate)
    return state["v"].rsqrt().mul_(grad)


def _normalise_factored(grad: Tensor, state: dict[str, Any], mixing_rate: float, epsilon: float) -> Tensor:
    """Mixes <float>[..., R, C] grad^2 into `v_row` and `v_col` and returns grad / sqrt(v_row v_col / mean(v_row))."""
    squared = grad.square()
    v_row = state["v_row"].lerp_(squared.mean(dim=-1).add_(epsilon), mixing_rate)
    v_col = state["v_col"].lerp_(squared.mean(dim=-2).add_(epsilon), mixing_rate)
    row_factor = v_row.div(v_row.mean(dim=-1, keepdim=True)).rsqrt_()
    return torch.mul(grad, row_factor.unsqueeze(-1), out=squared).mul_(v_col.rsqrt().unsqueeze(-2))


def _rms(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Returns the root mean square of x over `dims`, which stay with size 1; over no dimension, the magnitude."""
    count = 1
    for dim in dims:
        count *= x.shape[dim]
    return torch.linalg.vector_norm(x, dim=dims, keepdim=True).mul_(count**-0.5) if dims else x.abs()
