"""Which parameter lies where on a mesh: named rules, the layouts that follow, and torch's FSDP2
applied to them.

A parameter is cut over `ep` and `tp` first, then by FSDP over the data ranks that share it. A
layout is plain numbers: the planner counts with the same ones that a run is cut by.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from moe.distributed.mesh import Mesh, MeshConfig
from moe.errors import ConfigError


class Rule(NamedTuple):
    """Where parameters of one kind lie.

    Attributes:
        name: Of the kind.
        pattern: Regular expression that the whole name of a parameter matches.
        tp_dim: Dimension, from the end, that `tp` cuts; None for a copy on each rank of it.
        expert: Whether dimension 0 counts experts, which `ep` cuts.
        packed: Whether the second-last dimension is gate above up, 2F: on a mesh it is stored as
            two dimensions, 2 and F, so that F can be cut.
    """

    name: str
    pattern: str
    tp_dim: int | None = None
    expert: bool = False
    packed: bool = False


class Layout(NamedTuple):
    """Where one parameter lies.

    Attributes:
        rule: Name of the rule.
        shape: Of the whole parameter as it is stored on a mesh, gate and up apart.
        expert: Whether `ep` cuts dimension 0.
        tp_dim: Dimension that `tp` cuts; None for none.
        num_shards: Ranks that FSDP shards it over; 1 when FSDP does not shard it.
        shard_dim: Dimension that FSDP cuts.
        num_replicas: Data ranks that hold each shard.
    """

    rule: str
    shape: tuple[int, ...]
    expert: bool
    tp_dim: int | None
    num_shards: int
    shard_dim: int
    num_replicas: int

    def gathered_shape(self, config: MeshConfig) -> tuple[int, ...]:
        """Returns the shape with which a rank computes: cut over ep and tp only."""
        sizes = list(self.shape)
        if self.expert:
            sizes[0] //= config.ep
        if self.tp_dim is not None:
            sizes[self.tp_dim] //= config.tp
        return tuple(sizes)

    def local_shape(self, config: MeshConfig, shard: int = 0) -> tuple[int, ...]:
        """Returns the shape of FSDP's shard number `shard`; the first is the largest."""
        sizes = list(self.gathered_shape(config))
        start, end = chunk_range(sizes[self.shard_dim], self.num_shards, shard)
        sizes[self.shard_dim] = end - start
        return tuple(sizes)


class MeshCoordinate(NamedTuple):
    """A rank's place on the axes that cut a parameter.

    Attributes:
        ep: On `ep`.
        tp: On `tp`.
        dense_shard: Among the ranks that dense parameters are sharded over.
        expert_shard: Among those that experts are sharded over beside `ep`.
    """

    ep: int
    tp: int
    dense_shard: int
    expert_shard: int

    @classmethod
    def of(cls, mesh: Mesh) -> "MeshCoordinate":
        """Returns this rank's place."""
        whole = mesh.device_mesh
        ep, tp, shard = (whole.get_local_rank(axis) for axis in ("ep", "tp", "dp_shard"))
        return cls(ep, tp, shard * mesh.config.ep + ep, shard)


def find_rule(name: str, shape: Sequence[int], rules: Iterable[Rule]) -> Rule:
    """Returns the rule of the parameter `name` of shape `shape`.

    Raises:
        ConfigError: When no rule covers it.
    """
    rule = next((rule for rule in rules if re.fullmatch(rule.pattern, name)), None)
    if rule is None:
        raise ConfigError(
            f"No rule says where the parameter {name} of shape {tuple(shape)} lies on a mesh. Add a Rule for it, or "
            "leave the module out."
        )
    return rule


def find_layout(
    name: str, shape: Sequence[int], rules: Iterable[Rule], config: MeshConfig
) -> Layout:
    """Returns where the parameter `name` of shape `shape` lies.

    Raises:
        ConfigError: When no rule covers it.
    """
    rule, sizes = find_rule(name, shape, rules), list(shape)
    if rule.packed:
        sizes[-2:] = [2, sizes[-2] // 2, sizes[-1]]
    tp_dim = None if rule.tp_dim is None or config.tp == 1 else len(sizes) + rule.tp_dim
    shards = config.dp_shard * (1 if rule.expert else config.ep)
    replicas = config.dp_replicate
    layout = Layout(rule.name, tuple(sizes), rule.expert, tp_dim, shards, 0, replicas)
    return layout._replace(shard_dim=_shard_dim(layout, config))


def _shard_dim(layout: Layout, config: MeshConfig) -> int:
    """Returns the dimension that FSDP cuts: the first of 0, the last and the others that it cuts
    evenly, else 0.

    A dimension that `tp` cuts comes last, since cutting it again would take it out of order.
    """
    sizes, last = layout.gathered_shape(config), len(layout.shape) - 1
    free = [dim for dim in dict.fromkeys((0, last, *range(last))) if dim != layout.tp_dim]
    candidates = free if layout.tp_dim is None else [*free, layout.tp_dim]
    return next((dim for dim in candidates if sizes[dim] % layout.num_shards == 0), 0)


def chunk_range(size: int, parts: int, part: int) -> tuple[int, int]:
    """Returns start and end of part number `part` as torch.chunk cuts: full parts first, the rest
    may be empty.
    """
    share = math.ceil(size / parts)
    return min(size, part * share), min(size, (part + 1) * share)


def pack(x: Tensor, layout: Layout) -> Tensor:
    """Returns <any>[...] in the shape that it has on a mesh, gate and up apart; a view."""
    return x.view(layout.shape)


def shard_over_ep_tp(
    whole: Tensor, layout: Layout, config: MeshConfig, place: MeshCoordinate
) -> Tensor:
    """Returns the part of <any>[...] with which the rank at `place` computes, cut over ep and tp; a
    view.
    """
    part = pack(whole, layout)
    if layout.expert:
        share = layout.shape[0] // config.ep
        part = part.narrow(0, place.ep * share, share)
    if layout.tp_dim is not None:
        share = layout.shape[layout.tp_dim] // config.tp
        part = part.narrow(layout.tp_dim, place.tp * share, share)
    return part


def shard_over_fsdp(part: Tensor, layout: Layout, place: MeshCoordinate) -> Tensor:
    """Returns FSDP's shard of what `shard_over_ep_tp` returned, <any>[...]; a view."""
    if layout.num_shards == 1:
        return part
    shard = place.expert_shard if layout.expert else place.dense_shard
    start, end = chunk_range(part.shape[layout.shard_dim], layout.num_shards, shard)
    return part.narrow(layout.shard_dim, start, end - start)


def local_shard(x: Tensor) -> Tensor:
    """Returns this rank's part <any>[...] of a tensor that may be cut over ranks; keeps the
    gradient.
    """
    return x.to_local() if isinstance(x, DTensor) else x


def distribute_parameters(module: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh) -> None:
    """Puts this rank's part over ep and tp in place of each parameter; each whole one is let go of
    in turn.

    Args:
        module: With whole parameters, equal on all ranks, or on the meta device.
        layouts: By name of parameter.
        mesh: The ranks.
    """
    place, config = MeshCoordinate.of(mesh), mesh.config
    for name, parameter in list(module.named_parameters()):
        layout = layouts[name]
        part = shard_over_ep_tp(parameter.detach(), layout, config, place)
        axes = ("ep", "tp") if layout.expert else ("tp",)
        cut_over = {"ep": layout.expert, "tp": layout.tp_dim is not None}
        if any(mesh.device_mesh[axis].size() > 1 for axis in axes if cut_over[axis]):
            placements: list[Placement] = [
                Replicate() if layout.tp_dim is None else Shard(layout.tp_dim)
            ]
            if layout.expert:
                placements.insert(0, Shard(0))
            part = DTensor.from_local(
                part.clone(memory_format=torch.contiguous_format),
                mesh.device_mesh[axes],
                placements,
                run_check=False,
                shape=torch.Size(layout.shape),
                stride=torch.empty(layout.shape, device="meta").stride(),
            )
        elif part.shape == parameter.shape:
            continue  # stays the parameter that it is, shared ones too
        _set_parameter(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Puts a parameter in the place of that called `name`."""
    owner, _, last = name.rpartition(".")
    setattr(module.get_submodule(owner), last, parameter)


def shard_unit(
    module: nn.Module,
    mesh: Mesh,
    shard_dims: Mapping[nn.Parameter, int],
    *,
    experts: bool,
    bfloat16: bool,
) -> None:
    """Makes a module one unit of FSDP: gathered for its forward and backward pass, gradients summed
    over data ranks.

    Args:
        module: Whose parameters, but those of units inside it, become the unit's.
        mesh: The ranks.
        shard_dims: Dimension that each parameter is cut in.
        experts: Whether the unit holds experts, which are sharded over dp_shard only.
        bfloat16: Whether parameters are gathered in bfloat16; gradients are summed in their own
            precision all the same.
    """
    axes = mesh.experts if experts else mesh.dense
    replicated = mesh.config.dp_replicate > 1
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if bfloat16:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    outside = (
        set() if experts else {p for p in module.parameters() if _lies_with_experts_only(p, mesh)}
    )
    unit = cast(
        FSDPModule,
        fully_shard(
            module,
            mesh=axes if replicated else axes[cast(Any, axes.mesh_dim_names)[1]],
            shard_placement_fn=lambda parameter: Shard(shard_dims[parameter]),
            mp_policy=policy,
            ignored_params=outside,
        ),
    )
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)


def _lies_with_experts_only(parameter: nn.Parameter, mesh: Mesh) -> bool:
    """Returns whether a parameter is an expert's that no other data rank has: FSDP has nothing to
    do for it.
    """
    names = (
        cast(Any, parameter.device_mesh.mesh_dim_names) if isinstance(parameter, DTensor) else ()
    )
    return "ep" in names and mesh.experts.size() == 1


def sum_gradients_now(module: nn.Module, is_last: bool) -> None:
    """Says whether the next backward pass is the last of an update: only then gradients are summed
    over ranks.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(is_last)
        module.set_is_last_backward(is_last)


@torch.no_grad()
def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Returns the norm of all gradients together <float>[], the same on every rank, whatever meshes
    they lie on.

    Every shard is counted once: a sum of squares is divided by the number of ranks that hold the
    same shard.
    """
    parameters = list(parameters)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = torch.zeros(
        (), dtype=torch.float64, device=local_shard(grads[0]).device if grads else None
    )
    world = (
        dist.get_world_size()
        if any(isinstance(parameter, DTensor) for parameter in parameters)
        else 1
    )
    for grad in grads:
        cut_by = 1
        if isinstance(grad, DTensor):
            sizes, placements = grad.device_mesh.shape, grad.placements
            cut_by = math.prod(
                size for size, at in zip(sizes, placements, strict=True) if not at.is_replicate()
            )
        square = (
            torch.linalg.vector_norm(local_shard(grad), dtype=_wide(grad.dtype)).double().square()
        )
        total += square * (cut_by / world)
    if world > 1:
        dist.all_reduce(total)
    return total.sqrt().to(_wide(grads[0].dtype) if grads else torch.float32)


@torch.no_grad()
def clip_gradient(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Returns the norm of the gradient <float>[] and scales it down to `max_norm`, if given, as
    torch does.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters)
    if max_norm is not None:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in parameters:
            if parameter.grad is not None:
                local_shard(parameter.grad).mul_(scale)
    return norm


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
