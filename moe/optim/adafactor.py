"""Adafactor as T5X runs it: factored second moments, update clipping, steps relative to the
parameter's size.
"""

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe.errors import ConfigError
from moe.optim.sharded_parameters import Cut, Part, cut_of, local_part, sum_parts, zeros_along

MAX_BUCKET_ELEMENTS = 2**24
"""Elements of the shards that are updated together, 64 MiB in float32: their updates are held at once."""

Sums = Generator[list[Part], None, Any]
"""A computation that stops where it needs sums over ranks: it yields the parts and goes on when they are sums."""


class _Pending(NamedTuple):
    """A parameter with a gradient, its group of settings, and how it is cut."""

    parameter: Tensor
    group: dict[str, Any]
    cut: Cut


class Adafactor(torch.optim.Optimizer):
    """Adafactor without momentum and weight decay, whose expert axis is a batch axis.

    A parameter group may hold `batch_dims: n`: the first n dimensions then count separate
    parameters that are stored together (stacked experts). Moments, clipping and scale are taken
    within each of them, so that one expert's gradient never changes another's step. Of the other
    dimensions the last one is the columns of a matrix
    and all the rest are its rows: [2, F, D] takes the same steps as [2F, D]. So a stack that is not
    marked by `batch_dims` counts as one tall matrix. Set `group["lr"]` before each step; the
    schedule is the caller's.

    Moments are kept in float32 (float64 for float64 parameters), whatever the dtype of the
    parameters.

    DTensor parameters take the same steps as whole ones, each rank on its shard, wherever they are
    cut and on whatever mesh. Their gradients must be placed as they are, and all ranks must bring
    gradients of the same parameters. Sums
    run over exactly the axes that cut what is summed, and travel together: at most three
    all-reduces for each axis in `MAX_BUCKET_ELEMENTS`. Replicas stay equal when their gradients are
    and their ranks add in the same order.

    Args:
        params: Parameters or groups of them, see `parameter_groups`.
        lr: Step relative to RMS(parameter): 0.01 changes a parameter by up to 1 % a step.
        decay_exponent: Second-moment decay at step t = 0, 1, ... is 1 - (t + 1)^-decay_exponent;
            larger remembers longer.
        clipping_threshold: Largest RMS of an update before `lr` and scale; smaller damps spikes and
            learning.
        min_dim_size_to_factor: A matrix is factored when its rows and its columns reach this.
            Stacked matrices (`batch_dims` of 1 or more) are always factored: there the rule is
            explicit.
        epsilon1: Added to the squared gradient, so that a zero gradient divides by no zero.
        epsilon2: Least scale of a parameter; keeps a parameter of zeros learning.

    Raises:
        ConfigError: When a value is out of range or a parameter has no dimension beside its batch
            ones.

    Source:
        Adafactor (arXiv:1804.04235); google-research/t5x t5x/adafactor.py at 0eb60a642d. Differs:
        columns are the last dimension and rows the others, whichever is larger (the factors are
        symmetric, so for a matrix this changes nothing); each parameter counts its own steps, so
        that one that joins late starts fresh.
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
                bound = (
                    "0 or more"
                    if name in ("lr", "epsilon2", "min_dim_size_to_factor")
                    else "above 0"
                )
                raise ConfigError(
                    f"Adafactor's {name} is {value!r}; expected a finite number {bound}."
                )
        super().__init__(params, {**settings, "batch_dims": 0})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group after checking that its parameters are scalars, vectors or matrices, or
        stacks of the last two.

        Raises:
            ConfigError: When `batch_dims` is below 0, or a stack has no dimension beside its batch
                ones.
        """
        super().add_param_group(param_group)
        batch_dims = self.param_groups[-1]["batch_dims"]
        for parameter in self.param_groups[-1]["params"]:
            own_dims = parameter.ndim - batch_dims
            if batch_dims < 0 or own_dims < min(1, batch_dims):
                raise ConfigError(
                    f"Adafactor got a parameter of shape {tuple(parameter.shape)} in a group with batch_dims "
                    f"{batch_dims}: {own_dims} dimensions are left, expected a vector or a matrix. Put it into a "
                    "group whose batch_dims, 0 or more, counts the dimensions that only stack separate parameters."
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """Updates every parameter that has a gradient; the others, and their moments, stay as they
        are.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for bucket in _buckets(self._pending()):
            rounds = zip_longest(*(self._update(*pending) for pending in bucket), fillvalue=())
            for parts in rounds:
                sum_parts(chain.from_iterable(parts))
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state as it was saved.

        The base class casts moments to the dtype of the parameters, which would lose them under
        bfloat16: here they keep the dtype that they were saved in.
        """
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():
            parameter = parameters[index]
            self.state[parameter] = {
                name: value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
                for name, value in saved.items()
            }

    def _pending(self) -> Iterator[_Pending]:
        """Yields what has a gradient, in the order of the groups."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield _Pending(parameter, group, cut_of(parameter, group["batch_dims"]))

    def _update(self, parameter: Tensor, group: dict[str, Any], cut: Cut) -> Sums:
        """Takes one step on this rank's shard of one parameter."""
        state, batch_dims = self.state[parameter], group["batch_dims"]
        if not state:
            state.update(_initial_state(parameter, group, cut))
        precise, weight = _moment_dtype(parameter), local_part(parameter)
        value = _as_matrix(weight, batch_dims).to(precise)
        grad = _as_matrix(_local_gradient(parameter), batch_dims).to(precise)

        mixing_rate = (state["step"] + 1.0) ** -group["decay_exponent"]
        if "v_row" in state:
            update = yield from _normalise_factored(
                grad, state, cut, mixing_rate, group["epsilon1"]
            )
        else:
            update = _normalise(grad, state, mixing_rate, group["epsilon1"])
        state["step"] += 1

        scale, clipping = yield from _rms((value, update), batch_dims, cut)
        scale.clamp_(min=group["epsilon2"])
        clipping.div_(group["clipping_threshold"]).clamp_(min=1.0)
        value.addcmul_(update, scale.div_(clipping), value=-group["lr"])
        if value.data_ptr() != weight.data_ptr():
            weight.copy_(value.view_as(weight))


def _buckets(pending: Iterable[_Pending]) -> Iterator[list[_Pending]]:
    """Yields what is updated together: one that needs no sums over ranks alone, the others as many
    as are allowed.
    """
    bucket, elements = [], 0
    for item in pending:
        if not item.cut.groups:
            yield [item]
            continue
        if bucket and elements + item.cut.shard_elements > MAX_BUCKET_ELEMENTS:
            yield bucket
            bucket, elements = [], 0
        bucket.append(item)
        elements += item.cut.shard_elements
    if bucket:
        yield bucket


def _moment_dtype(parameter: Tensor) -> torch.dtype:
    """Returns float32, or float64 for a float64 parameter."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _as_matrix(x: Tensor, batch_dims: int) -> Tensor:
    """Returns <any>[..., R, C] with all rows in one dimension, in the same memory if it allows
    that.
    """
    return x.flatten(batch_dims, -2) if x.ndim - batch_dims > 2 else x


def _local_gradient(parameter: Tensor) -> Tensor:
    """Returns this rank's shard of the gradient, <float>[...]."""
    grad = parameter.grad
    assert grad is not None, "step() updates only parameters with a gradient"
    if isinstance(parameter, DTensor):
        placements = grad.placements if isinstance(grad, DTensor) else "on no mesh"
        assert placements == parameter.placements, (
            f"a parameter placed as {parameter.placements} has a gradient that is placed as {placements}"
        )
    return local_part(grad)


def _initial_state(parameter: Tensor, group: dict[str, Any], cut: Cut) -> dict[str, Any]:
    """Returns step 0 and zero moments: `v_row` and `v_col` when the parameter is factored, else
    `v`.
    """
    dims, batch_dims, dtype = (
        tuple(range(parameter.ndim)),
        group["batch_dims"],
        _moment_dtype(parameter),
    )
    is_matrix = len(dims) - batch_dims >= 2
    if is_matrix and (
        batch_dims > 0 or min(cut.num_rows, cut.num_columns) >= group["min_dim_size_to_factor"]
    ):
        v_row = zeros_along(parameter, dims[:-1], dtype)
        v_col = zeros_along(parameter, (*dims[:batch_dims], dims[-1]), dtype)
        return {"step": 0, "v_row": v_row, "v_col": v_col}
    return {"step": 0, "v": zeros_along(parameter, dims, dtype)}


def _normalise(grad: Tensor, state: dict[str, Any], mixing_rate: float, epsilon: float) -> Tensor:
    """Mixes <float>[...] grad^2 into `v` and returns grad / sqrt(v)."""
    v = local_part(state["v"]).view_as(grad)
    v.lerp_(grad.square().add_(epsilon), mixing_rate)
    return v.rsqrt().mul_(grad)


def _normalise_factored(
    grad: Tensor, state: dict[str, Any], cut: Cut, mixing_rate: float, epsilon: float
) -> Sums:
    """Mixes <float>[..., R, C] grad^2 into `v_row` and `v_col` and returns grad / sqrt(v_row v_col
    / mean(v_row)).
    """
    squared = grad.square()
    row_mean = _part_of_mean(squared, -1, cut.num_columns)
    col_mean = _part_of_mean(squared, -2, cut.num_rows)
    yield [(row_mean, cut.column_groups), (col_mean, cut.row_groups)]
    v_row = local_part(state["v_row"]).view_as(row_mean).lerp_(row_mean.add_(epsilon), mixing_rate)
    v_col = local_part(state["v_col"]).lerp_(col_mean.add_(epsilon), mixing_rate)
    mean = _part_of_mean(v_row, -1, cut.num_rows).unsqueeze(-1)
    yield [(mean, cut.row_groups)]
    row_factor = v_row.div(mean).rsqrt_()
    return torch.mul(grad, row_factor.unsqueeze(-1), out=squared).mul_(v_col.rsqrt().unsqueeze(-2))


def _part_of_mean(x: Tensor, dim: int, count: int) -> Tensor:
    """Returns the mean of x over `dim`, which has `count` entries; of a shard, its share of that
    mean.
    """
    return x.mean(dim) if x.shape[dim] == count else x.sum(dim).div_(count)


def _rms(tensors: tuple[Tensor, ...], batch_dims: int, cut: Cut) -> Sums:
    """Returns the root mean square of each of <float>[..., R, C] over its matrices, as <float>[...,
    1, 1].
    """
    norms = [_norm(x, tuple(range(batch_dims, x.ndim))) for x in tensors]
    if cut.groups:
        yield [(norm.square_(), cut.groups) for norm in norms]
        norms = [norm.sqrt_() for norm in norms]
    return [norm.mul_((cut.num_rows * cut.num_columns) ** -0.5) for norm in norms]


def _norm(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Returns the root of the sum of squares over `dims`, which stay with size 1; over no
    dimension, the magnitude.
    """
    return torch.linalg.vector_norm(x, dim=dims, keepdim=True) if dims else x.abs()
