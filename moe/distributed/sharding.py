"""Sharding of parameters over a mesh: named rules, the layouts that follow, and torch's FSDP2.

A parameter is sharded over `ep` and `tp` first, then by FSDP over the data ranks that share it. A
layout consists of plain numbers: the planner uses the same layouts as a run.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from moe.distributed.mesh import Mesh, MeshConfig
from moe.errors import ConfigError


class Rule(NamedTuple):
    """Sharding of parameters of one kind.

    Attributes:
        name: Name of the kind.
        pattern: Regular expression that matches the whole name of a parameter.
        tp_dim: Dimension, from the end, that `tp` shards; None for a copy on each rank.
        expert: Whether dimension 0 counts experts, which `ep` shards.
        packed: Whether the second-last dimension is gate and up, 2F: on a mesh it is stored as two
            dimensions, 2 and F, so that F can be sharded.
    """

    name: str
    pattern: str
    tp_dim: int | None = None
    expert: bool = False
    packed: bool = False


class MeshCoordinate(NamedTuple):
    """Coordinate of a rank on the axes that shard parameters.

    Attributes:
        ep: Coordinate on `ep`.
        tp: Coordinate on `tp`.
        dense_shard: Number among the ranks over which dense parameters are sharded.
        expert_shard: Number among the ranks over which experts are sharded besides `ep`.
    """

    ep: int
    tp: int
    dense_shard: int
    expert_shard: int

    @classmethod
    def of(cls, mesh: Mesh) -> "MeshCoordinate":
        """Returns the coordinate of this rank."""
        ep = mesh.device_mesh.get_local_rank("ep")
        tp = mesh.device_mesh.get_local_rank("tp")
        dp_shard = mesh.device_mesh.get_local_rank("dp_shard")

        # Dense parameters are sharded over dp_shard x ep, of which ep is the inner axis.
        dense_shard = dp_shard * mesh.config.ep + ep
        return cls(ep, tp, dense_shard, expert_shard=dp_shard)


class Layout(NamedTuple):
    """Sharding of one parameter.

    Attributes:
        rule: Name of the rule.
        shape: Shape of the whole parameter as stored on a mesh, with gate and up separate.
        expert: Whether `ep` shards dimension 0.
        tp_dim: Dimension that `tp` shards; None for none.
        num_shards: Ranks over which FSDP shards it; 1 if FSDP does not shard it.
        shard_dim: Dimension that FSDP shards.
        num_replicas: Data ranks that hold each shard.
        packed: See Rule.
    """

    rule: str
    shape: tuple[int, ...]
    expert: bool
    tp_dim: int | None
    num_shards: int
    shard_dim: int
    num_replicas: int
    packed: bool

    @property
    def fsdp_axes(self) -> tuple[str, ...]:
        """Mesh axes over which FSDP shards it."""
        return ("dp_shard",) if self.expert else ("dp_shard", "ep")

    def gathered_shape(self, config: MeshConfig) -> tuple[int, ...]:
        """Returns the shape in computation: sharded over ep and tp only."""
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

    def shard_index(self, coordinate: MeshCoordinate) -> int:
        """Returns a rank's number among those over which FSDP shards the parameter."""
        return coordinate.expert_shard if self.expert else coordinate.dense_shard


def find_rule(name: str, shape: Sequence[int], rules: Iterable[Rule]) -> Rule:
    """Returns the first rule that covers a parameter.

    Args:
        name: Name of the parameter; PEFT's `.base_layer` in it counts for nothing.
        shape: Shape of the parameter, for the message.
        rules: Rules in the order in which they are tried.

    Raises:
        ConfigError: When no rule covers it.
    """
    for rule in rules:
        if re.fullmatch(rule.pattern, name.replace(".base_layer", "")):
            return rule
    raise ConfigError(
        f"No rule defines the layout of parameter {name} of shape {tuple(shape)} on a mesh. Add a Rule for it, or "
        "leave the module out."
    )


def find_layout(
    name: str, shape: Sequence[int], rules: Iterable[Rule], config: MeshConfig
) -> Layout:
    """Returns the layout of the parameter `name` of shape `shape`.

    Raises:
        ConfigError: When no rule covers it.
    """
    rule = find_rule(name, shape, rules)

    # Gate and up, [..., 2F, D], are stored as [..., 2, F, D].
    sizes = list(shape)
    if rule.packed:
        sizes[-2:] = [2, sizes[-2] // 2, sizes[-1]]

    # Rules count dimensions from the end, which packing does not change.
    tp_dim = None
    if rule.tp_dim is not None and config.tp > 1:
        tp_dim = len(sizes) + rule.tp_dim

    # FSDP shards dense parameters over dp_shard x ep; experts are already on their rank of `ep`.
    num_shards = config.dp_shard
    if not rule.expert:
        num_shards *= config.ep

    layout = Layout(
        rule=rule.name,
        shape=tuple(sizes),
        expert=rule.expert,
        tp_dim=tp_dim,
        num_shards=num_shards,
        shard_dim=0,
        num_replicas=config.dp_replicate,
        packed=rule.packed,
    )
    return layout._replace(shard_dim=_choose_shard_dim(layout, config))


def _choose_shard_dim(layout: Layout, config: MeshConfig) -> int:
    """Returns the dimension that FSDP shards: the first that it shards evenly, else 0.

    The order is 0, the last and the others; a dimension that `tp` shards comes last, since sharding
    it again would change the order of elements.
    """
    sizes = layout.gathered_shape(config)
    last = len(sizes) - 1

    candidates = list(dict.fromkeys((0, last, *range(last))))
    if layout.tp_dim is not None:
        candidates.remove(layout.tp_dim)
        candidates.append(layout.tp_dim)

    # Shards of equal size need no padding.
    for dim in candidates:
        if sizes[dim] % layout.num_shards == 0:
            return dim
    return 0


def chunk_range(size: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Returns start and end of chunk number `index` as torch.chunk divides `size`.

    Full chunks come first, the last ones may be empty.
    """
    chunk_size = math.ceil(size / num_chunks)
    start = min(size, index * chunk_size)
    end = min(size, (index + 1) * chunk_size)
    return start, end


def shard_over_ep_tp(
    whole: Tensor, layout: Layout, config: MeshConfig, coordinate: MeshCoordinate
) -> Tensor:
    """Returns the part of a whole parameter with which one rank computes; a view.

    Args:
        whole: <any>[...] the parameter in a single process.
        layout: Its layout.
        config: Sizes of the mesh.
        coordinate: The rank's.

    Returns:
        <any>[...] of the layout's gathered shape.
    """
    # Both axes divide their dimension, as `check_mesh` ensures.
    part = whole.view(layout.shape)
    if layout.expert:
        num_local_experts = layout.shape[0] // config.ep
        part = part.narrow(0, coordinate.ep * num_local_experts, num_local_experts)
    if layout.tp_dim is not None:
        local_size = layout.shape[layout.tp_dim] // config.tp
        part = part.narrow(layout.tp_dim, coordinate.tp * local_size, local_size)
    return part


def shard_over_fsdp(part: Tensor, layout: Layout, coordinate: MeshCoordinate) -> Tensor:
    """Returns FSDP's shard of a result of `shard_over_ep_tp`, <any>[...]; a view."""
    if layout.num_shards == 1:
        return part
    size = part.shape[layout.shard_dim]
    start, end = chunk_range(size, layout.num_shards, layout.shard_index(coordinate))
    return part.narrow(layout.shard_dim, start, end - start)


def copy_shard(
    whole: Tensor, shard: Tensor, layout: Layout, config: MeshConfig, coordinate: MeshCoordinate
) -> None:
    """Copies one rank's part of a whole parameter <float>[...] into its shard <float>[...]."""
    part = shard_over_ep_tp(whole, layout, config, coordinate)
    part = shard_over_fsdp(part, layout, coordinate)
    shard.copy_(part.reshape(shard.shape))


def local_shard(x: Tensor) -> Tensor:
    """Returns this rank's shard <any>[...] of a tensor; keeps the gradient.

    A tensor outside of a mesh is its own shard.
    """
    return x.to_local() if isinstance(x, DTensor) else x


def distribute_parameters(module: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh) -> None:
    """Replaces each parameter by this rank's shard over ep and tp, one after the other.

    Each whole parameter is freed before the next one is sharded.

    Args:
        module: Module with whole parameters, equal on all ranks, or on the meta device.
        layouts: Layouts by name of parameter.
        mesh: The ranks.
    """
    coordinate = MeshCoordinate.of(mesh)
    for name, parameter in list(module.named_parameters()):
        layout = layouts[name]
        part = shard_over_ep_tp(parameter.detach(), layout, mesh.config, coordinate)

        over_ep = layout.expert and mesh.config.ep > 1
        over_tp = layout.tp_dim is not None and mesh.config.tp > 1
        if over_ep or over_tp:
            part = _as_dtensor(part, layout, mesh.device_mesh)
        elif part.shape == parameter.shape:
            continue  # keeps the parameter, which may be shared

        owner, _, attribute = name.rpartition(".")
        shard = nn.Parameter(part, requires_grad=parameter.requires_grad)
        setattr(module.get_submodule(owner), attribute, shard)


def _as_dtensor(part: Tensor, layout: Layout, device_mesh: DeviceMesh) -> DTensor:
    """Returns a copy of a rank's shard <any>[...] as a DTensor on `tp`, an expert's on `ep` too."""
    on_tp: Placement = Replicate() if layout.tp_dim is None else Shard(layout.tp_dim)

    # Experts are sharded on both axes, dense parameters are equal on all ranks of `ep`.
    axes: tuple[str, ...] = ("tp",)
    placements = [on_tp]
    if layout.expert:
        axes = ("ep", "tp")
        placements = [Shard(0), on_tp]

    # Copied, so that the whole parameter can be freed.
    return DTensor.from_local(
        part.clone(memory_format=torch.contiguous_format),
        device_mesh[axes],
        placements,
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=torch.empty(layout.shape, device="meta").stride(),
    )


def shard_unit(
    module: nn.Module,
    mesh: Mesh,
    shard_dims: Mapping[nn.Parameter, int],
    *,
    experts: bool,
    bfloat16: bool,
) -> None:
    """Makes a module one unit of FSDP.

    Its parameters are gathered for its forward and backward passes, and its gradients are summed over
    data ranks, both separately from units inside it.

    Args:
        module: Becomes the unit.
        mesh: The ranks.
        shard_dims: Dimension in which each parameter is sharded.
        experts: Whether the unit holds experts, which are sharded over dp_shard only.
        bfloat16: Whether parameters are gathered in bfloat16; gradients are summed in float32.
    """
    # With one replica the mesh of the unit is only its sharding axis: plain FSDP, not HSDP. The same
    # holds if a schedule sums over replicas.
    whole_mesh = mesh.experts if experts else mesh.dense
    shards = whole_mesh[cast(Any, whole_mesh.mesh_dim_names)[1]]
    has_replicas = mesh.config.dp_replicate > 1 and mesh.gradients is None
    unit_mesh = whole_mesh if has_replicas else shards

    # Inputs keep their dtype: autocast casts where a product needs it.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bfloat16 else None,
        reduce_dtype=torch.float32 if bfloat16 else None,
        cast_forward_inputs=False,
    )

    # Experts held by no other data rank need no gathering.
    ignored: set[nn.Parameter] = set()
    if not experts:
        ignored = {p for p in module.parameters() if _has_one_data_rank(p, mesh)}

    fully_shard(
        module,
        mesh=unit_mesh,
        shard_placement_fn=lambda parameter: Shard(shard_dims[parameter]),
        mp_policy=policy,
        ignored_params=ignored,
    )

    # Losses are already divided by the counts of all ranks: gradients are summed, not averaged.
    unit = cast(FSDPModule, module)
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    if mesh.gradients is not None:
        mesh.gradients.attach(unit, whole_mesh.get_group(0))


def _has_one_data_rank(parameter: nn.Parameter, mesh: Mesh) -> bool:
    """Returns whether a parameter is of experts that no other data rank holds."""
    if not isinstance(parameter, DTensor):
        return False
    axes = cast(Any, parameter.device_mesh.mesh_dim_names)
    return "ep" in axes and mesh.experts.size() == 1


def refuse_to_save(mesh: MeshConfig | None) -> None:
    """Raises a ConfigError for `save_pretrained` of a model on a mesh; None is a whole model."""
    if mesh is not None:
        raise ConfigError(
            f"save_pretrained is not supported on a mesh ({mesh}), where a rank has a part of the "
            "model. Call moe.checkpoint.save_model_on_mesh(model, layouts, mesh, folder) on every rank."
        )


def refuse_loss_of_a_rank(model: Any) -> None:
    """Raises a ConfigError for a loss with the counts of one rank, where gradients are summed over ranks.

    Args:
        model: The model; its `mesh_config` is None when it is whole.
    """
    mesh = model.mesh_config
    is_trained = model.training and torch.is_grad_enabled()
    if is_trained and mesh is not None and mesh.num_data_ranks > 1:
        raise ConfigError(
            f"The loss got no counts of the whole batch, but gradients are summed over {mesh.num_data_ranks} data "
            "ranks. Pass num_items_in_batch, the targets of all ranks, or to an STMoE model "
            "loss_counts=model.loss_counts(batch, mesh); to evaluate, use torch.no_grad()."
        )


def sum_gradients_now(module: nn.Module, is_last: bool) -> None:
    """Tells FSDP whether the next backward pass is the last of an update.

    Only then are gradients summed over ranks.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(is_last)
        module.set_is_last_backward(is_last)


@torch.no_grad()
def clip_gradient(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Returns the norm of all gradients <float>[] before they are scaled down to `max_norm`.

    It is what `torch.nn.utils.clip_grad_norm_` does in one process. Parameters may be on different
    meshes. Every shard is counted once: its sum of squares is divided by the number of ranks that
    hold it. Every rank must call it, and gets the same norm.

    Args:
        parameters: Parameters whose gradients are clipped.
        max_norm: Largest norm afterwards; None scales nothing.
    """
    parameters = list(parameters)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]

    # A rank without any gradient takes part, too.
    num_ranks = 1
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        num_ranks = dist.get_world_size()

    device = local_shard(grads[0]).device if grads else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        local = local_shard(grad)
        norm = torch.linalg.vector_norm(local, dtype=_at_least_float32(grad.dtype))

        # num_ranks / num_shards ranks hold the same shard and add the same square.
        total += norm.double().square() * (_num_shards(grad) / num_ranks)
    if num_ranks > 1:
        dist.all_reduce(total)

    norm = total.sqrt().to(_at_least_float32(grads[0].dtype) if grads else torch.float32)
    if max_norm is not None:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch has the same 1e-6
        for grad in grads:
            local_shard(grad).mul_(scale)
    return norm


def _num_shards(x: Tensor) -> int:
    """Returns into how many different shards a tensor is divided over its mesh."""
    if not isinstance(x, DTensor):
        return 1
    num_shards = 1
    for axis, placement in enumerate(x.placements):
        if not placement.is_replicate():
            num_shards *= x.device_mesh.size(axis)
    return num_shards


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


ShardSlices = tuple[tuple[int, int], ...]
"""Start and end in each dimension of a whole tensor."""


def shard_slices(layout: Layout, config: MeshConfig, coordinate: MeshCoordinate) -> ShardSlices:
    """Returns one rank's shard of a parameter, with gate and up projection separate.

    It equals the result of `shard_over_ep_tp` and `shard_over_fsdp`.
    """
    slices = [(0, size) for size in layout.shape]

    # ep and tp first, then FSDP within what they left.
    if layout.expert:
        slices[0] = chunk_of_interval(slices[0], config.ep, coordinate.ep)
    if layout.tp_dim is not None:
        dim = layout.tp_dim
        slices[dim] = chunk_of_interval(slices[dim], config.tp, coordinate.tp)
    if layout.num_shards > 1:
        dim = layout.shard_dim
        index = layout.shard_index(coordinate)
        slices[dim] = chunk_of_interval(slices[dim], layout.num_shards, index)
    return tuple(slices)


def is_first_replica(layout: Layout, mesh: Mesh, coordinate: MeshCoordinate) -> bool:
    """Returns whether this rank is the first that holds its shard of a parameter."""
    first_of_replicas = mesh.device_mesh.get_local_rank("dp_replicate") == 0

    # An axis that does not shard the parameter holds copies of it.
    first_of_tp = layout.tp_dim is not None or coordinate.tp == 0
    first_of_fsdp = layout.num_shards > 1 or layout.shard_index(coordinate) == 0
    return first_of_replicas and first_of_tp and first_of_fsdp


def contiguous_runs(slices: ShardSlices, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the contiguous runs of elements that slices of a whole tensor consist of.

    They are in the order of the shard's elements, row by row.

    Args:
        slices: Start and end in each dimension.
        shape: Shape of the whole tensor.

    Yields:
        Start in the whole tensor and length of each run, in elements.
    """
    sizes = [end - start for start, end in slices]
    if 0 in sizes:
        return

    # From the last sharded dimension on all elements of a run are neighbours.
    last_sharded = 0
    for dim, size in enumerate(sizes):
        if size != shape[dim]:
            last_sharded = dim
    length = math.prod(sizes[last_sharded:])

    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    starts = [start for start, _ in slices]
    first = _element_offset(starts, strides)

    # One run for each index into the dimensions before.
    outer_ranges = map(range, sizes[:last_sharded])
    for index in itertools.product(*outer_ranges):
        yield first + _element_offset(index, strides), length


def _element_offset(index: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the number of elements before an index into the first dimensions of a tensor."""
    offset = 0
    for position, stride in zip(index, strides, strict=False):
        offset += position * stride
    return offset


def chunk_of_interval(whole: tuple[int, int], num_chunks: int, index: int) -> tuple[int, int]:
    """Returns start and end of one chunk of the interval between two ends."""
    first, last = whole
    start, end = chunk_range(last - first, num_chunks, index)
    return first + start, first + end
