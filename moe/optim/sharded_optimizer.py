"""The base of optimizers that sum over a parameter's matrices: each rank updates its shard.

A parameter is read as `<float>[..., n, m]`, see sharded_parameters.py; adafactor.py, muon.py,
lars.py and lamb.py say what a step is.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe.checks import check_number
from moe.distributed.sharding import local_shard
from moe.errors import ConfigError
from moe.optim.parameter_groups import WEIGHT
from moe.optim.sharded_parameters import (
    MatrixSharding,
    PartialSum,
    local_gradient,
    matrix_sharding,
    sum_in_place,
    zeros_with_dims,
)
from moe.optim.stacking import PendingUpdate, Stack, State, alike, stack_updates

MAX_BUCKET_ELEMENTS = 2**24
"""Elements of the shards that are updated together, 64 MiB in float32: their updates are held at once."""

_AT_LEAST_ZERO = ("lr", "weight_decay", "epsilon", "min_dim_size_to_factor")

SumsOverRanks = Generator[list[PartialSum], None, Any]
"""A computation that needs sums over ranks: it yields partial sums and resumes when they are summed.

So all parameters of a bucket are computed side by side and their sums travel together.
"""


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer that reads each parameter as matrices, whose sums it takes over ranks.

    A parameter group may hold `batch_dims: n`: the first n dimensions then count separate
    parameters that are stored together (stacked experts), whose sums are separate. DTensor
    parameters take the same steps as whole ones. Their gradients must be placed as they are, and
    all ranks must bring gradients of the same parameters.

    Sums are bucketed: an all-reduce for each round of `update` and each axis, in
    `MAX_BUCKET_ELEMENTS`. Small parameters of one shape that are on no mesh are updated as one stack
    on an accelerator, with the same result up to rounding.
    """

    stack_small: bool | None = None
    """Whether small parameters of one shape are updated as one; None for those on an accelerator."""

    above_zero: Sequence[str] = ()
    """Settings that must be above 0."""

    below_one: Sequence[str] = ()
    """Settings that must be from 0 to below 1."""

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        for name, value in settings.items():
            what = f"{name} of {type(self).__name__.lower()}"
            if name in self.above_zero:
                check_number(what, value, above=0)
            elif name in self.below_one:
                check_number(what, value, least=0, below=1)
            elif name in _AT_LEAST_ZERO:
                check_number(what, value, least=0)
        super().__init__(params, {**settings, "batch_dims": 0})

    @abstractmethod
    def update(self, pending: PendingUpdate) -> SumsOverRanks:
        """Takes one step on this rank's shard of one parameter."""

    def held_elements(self, sharding: MatrixSharding) -> int:
        """Returns the elements that `update` holds for one parameter, the same on every rank."""
        return sharding.shard_elements

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of scalars, vectors or matrices, or of stacks of the last two.

        Raises:
            ConfigError: When `batch_dims` is below 0, or a stack has only batch dimensions.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        batch_dims = group["batch_dims"]
        for parameter in group["params"]:
            # A scalar is allowed; a stack of scalars is a vector without `batch_dims`.
            matrix_dims = parameter.ndim - batch_dims
            if batch_dims < 0 or matrix_dims < min(1, batch_dims):
                raise ConfigError(
                    f"batch_dims is {batch_dims} for a parameter of shape {tuple(parameter.shape)}: {matrix_dims} "
                    "dimensions are left, expected a vector or a matrix. Set it to the number of dimensions, 0 or "
                    "more, that only stack separate parameters."
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """Updates every parameter that has a gradient; other parameters and their state are unchanged."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        others = self._update_stacks()
        for bucket in self._buckets(others):
            updates = [self.update(pending) for pending in bucket]

            # Each round takes all updates to their next sum over ranks.
            for partial_sums in zip_longest(*updates, fillvalue=()):
                sum_in_place(chain.from_iterable(partial_sums))
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state as it was saved.

        The base class casts moments to the dtype of the parameters, which would lose them under
        bfloat16: here they keep the dtype that they were saved in.
        """
        super().load_state_dict(state_dict)

        # Saved states are numbered in the order of the groups.
        parameters = list(chain.from_iterable(group["params"] for group in self.param_groups))

        # Once more, as they were saved.
        for index, saved in state_dict["state"].items():
            parameter = parameters[index]
            state = dict(saved)
            for name, value in saved.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(parameter.device, copy=True)
            self.state[parameter] = state

    def _pending_updates(self) -> Iterator[PendingUpdate]:
        """Yields the parameters that have a gradient, in the order of the groups."""
        for group in self.param_groups:
            parameters = group["params"]
            kinds = group.get("kinds") or [WEIGHT] * len(parameters)
            for parameter, kind in zip(parameters, kinds, strict=True):
                if parameter.grad is not None:
                    sharding = matrix_sharding(parameter, group["batch_dims"])
                    yield PendingUpdate(parameter, group, sharding, kind)

    def _update_stacks(self) -> list[PendingUpdate]:
        """Updates small parameters in stacks, and returns all other updates."""
        others: list[PendingUpdate] = []
        may_stack: list[tuple[PendingUpdate, State]] = []
        for pending in self._pending_updates():
            stacks = self.stack_small
            if stacks is None:
                stacks = not pending.parameter.is_cpu
            if stacks:
                may_stack.append((pending, self.state[pending.parameter]))
            else:
                others.append(pending)

        for members in alike(may_stack):
            updates, states = zip(*members, strict=True)
            if len(updates) == 1:
                others.append(updates[0])
            else:
                self._update_stack(stack_updates(updates, states))
        return others

    def _update_stack(self, stack: Stack) -> None:
        stacked = stack.pending.parameter
        self.state[stacked] = stack.state
        for _ in self.update(stack.pending):
            pass  # partial sums over no ranks are the sums
        del self.state[stacked]
        stack.save()

    def _buckets(self, updates: Iterable[PendingUpdate]) -> Iterator[list[PendingUpdate]]:
        """Yields groups of parameters that are updated together.

        A parameter that needs no sums over ranks comes alone, the others in buckets of at most
        `MAX_BUCKET_ELEMENTS`.
        """
        bucket: list[PendingUpdate] = []
        num_elements = 0
        for update in updates:
            if not update.sharding.groups:
                yield [update]
                continue

            # A bucket that would grow too large is closed first.
            elements = self.held_elements(update.sharding)
            if bucket and num_elements + elements > MAX_BUCKET_ELEMENTS:
                yield bucket
                bucket = []
                num_elements = 0
            bucket.append(update)
            num_elements += elements
        if bucket:
            yield bucket


class WorkingCopy(NamedTuple):
    """The shard of a parameter and of its gradient that this rank has, at least in float32.

    Attributes:
        X: <float>[..., n, m] the parameter, a view of it where dtype and memory allow it.
        G: <float>[..., n, m] the gradient.
        shard: <float>[...] the shard of the parameter itself.
    """

    X: Tensor
    G: Tensor
    shard: Tensor

    def save(self) -> None:
        """Writes X back where it is a copy."""
        if self.X.data_ptr() != self.shard.data_ptr():
            self.shard.copy_(self.X.view_as(self.shard))


def working_copy(parameter: Tensor, batch_dims: int) -> WorkingCopy:
    """Returns parameter and gradient as a step computes with them.

    Args:
        parameter: <float>[..., n, m] with a gradient, placed alike.
        batch_dims: How many of its first dimensions count separate matrices.
    """
    dtype = moment_dtype(parameter)
    shard = local_shard(parameter)
    X = _as_matrix(shard, batch_dims).to(dtype)  # [..., n, m]
    G = _as_matrix(local_gradient(parameter), batch_dims).to(dtype)  # [..., n, m]
    return WorkingCopy(X, G, shard)


def moment_dtype(parameter: Tensor) -> torch.dtype:
    """Returns float32, or float64 for a float64 parameter."""
    return torch.promote_types(parameter.dtype, torch.float32)


def zero_moment(parameter: Tensor) -> Tensor:
    """Returns zeros <float>[..., n, m] of the moments' dtype, placed as the parameter."""
    dims = tuple(range(parameter.ndim))
    return zeros_with_dims(parameter, dims, moment_dtype(parameter))


def _as_matrix(x: Tensor, batch_dims: int) -> Tensor:
    """Returns <any>[..., n, m] with all rows in one dimension, a view where memory allows it."""
    return x.flatten(batch_dims, -2) if x.ndim - batch_dims > 2 else x


def adam_step(g: Tensor, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Updates the moments of a shard and returns Adam's step <float>[..., n, m], before the rate.

    Args:
        g: <float>[..., n, m] this rank's shard of the gradient.
        parameter: <float>[..., n, m] the parameter.
        state: Its state; moments are added at the first step.
        group: `beta1`, `beta2` and `epsilon`.

    Source:
        Adam (arXiv:1412.6980) algorithm 1. Differs: no.
    """
    if not state:
        state["step"] = 0
        state["exp_avg"] = zero_moment(parameter)
        state["exp_avg_sq"] = zero_moment(parameter)
    state["step"] += 1

    # m_t = beta1 m_{t-1} + (1 - beta1) g_t, and v_t likewise of g_t^2.
    m = local_shard(state["exp_avg"]).view_as(g)
    m.lerp_(g, 1 - group["beta1"])
    v = local_shard(state["exp_avg_sq"]).view_as(g)
    v.mul_(group["beta2"]).addcmul_(g, g, value=1 - group["beta2"])

    # Moments that start at 0 are too small by these factors.
    m_correction = 1 - group["beta1"] ** state["step"]
    v_correction = 1 - group["beta2"] ** state["step"]
    denominator = v.sqrt().div_(math.sqrt(v_correction)).add_(group["epsilon"])
    return denominator.reciprocal_().mul_(m).div_(m_correction)


def matrix_norms(
    tensors: tuple[Tensor, ...], batch_dims: int, sharding: MatrixSharding
) -> SumsOverRanks:
    """Returns the norm of each of <float>[..., n, m] by matrix, <float>[..., 1, 1]."""
    matrix_dims = tuple(range(batch_dims, tensors[0].ndim))
    norms = [torch.linalg.vector_norm(x, dim=matrix_dims, keepdim=True) for x in tensors]

    # Sums of squares are added over ranks, roots are not.
    if sharding.groups:
        yield [PartialSum(norm.square_(), sharding.groups) for norm in norms]
        for norm in norms:
            norm.sqrt_()
    return norms
