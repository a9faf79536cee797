"""A host on a mesh: experts over `ep`, everything else sharded by FSDP or whole."""

from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.distributed.tensor import DTensor

from moe.checkpoint.sharded_weights import stored_tensors
from moe.checks import check
from moe.distributed.collectives import broadcast_from_rank_zero, is_rank_zero
from moe.distributed.mesh import Mesh
from moe.distributed.sharding import Layout, Rule, distribute_parameters, find_layout, shard_unit
from moe.errors import ConfigError
from moe.hosts.model import SparseHost
from moe.models.parallelize import shard_block
from moe.models.weight_files import write_weight_sums
from moe.sparse.layer import SparseFeedForward


def host_rules(*, gated: bool) -> tuple[Rule, ...]:
    """Returns the rules that cover every parameter of a host.

    Args:
        gated: Whether gate and up projection of the experts are packed in one parameter.
    """
    return (
        Rule("experts in", r".*\.sparse\.experts\.(gate_)?up_proj", expert=True, packed=gated),
        Rule("experts out", r".*\.sparse\.experts\.down_proj", expert=True),
        Rule("expert bias", r".*\.sparse\.experts\.bias", expert=True),
        Rule("host", r".*"),
    )


def shard_host(
    model: Any, mesh: Mesh, *, bfloat16: bool = False, gather: bool = True
) -> dict[str, Layout]:
    """Shards a host with sparse layers over a mesh, and returns the layout of each parameter.

    Gradients are summed over ranks, not averaged: give each call `num_items_in_batch`, the targets
    of all ranks. Then losses and gradients are those of one process.

    Args:
        model: The model, whole and equal on all ranks.
        mesh: The ranks; without `tp`, since the host's attention is not sharded.
        bfloat16: Whether the parameters of blocks are gathered in bfloat16, for autocast.
        gather: Whether FSDP shards dense parameters; False keeps all of them on each rank, for
            inference.

    Raises:
        ConfigError: When the model is not a host with sparse layers, or the mesh does not fit.
    """
    check(isinstance(model, SparseHost), "The model to shard", type(model), "a host of load_model")
    sizes = mesh.config
    if sizes.tp > 1:
        raise ConfigError(
            f"The mesh has tp {sizes.tp}; expected 1: the attention of a host is not sharded over "
            "tp. Use ep and dp_shard."
        )
    num_experts = model.settings.num_experts
    expected = f"a divisor of the {num_experts} experts"
    check(num_experts % sizes.ep == 0, "ep of the mesh", sizes.ep, expected)

    rules = host_rules(gated=len(model.host.first) == 2)
    layouts: dict[str, Layout] = {}
    for name, parameter in model.named_parameters():
        layout = find_layout(name, parameter.shape, rules, sizes)
        layouts[name] = layout if gather else layout._replace(num_shards=1)
    distribute_parameters(model, layouts, mesh)
    for module in model.modules():
        if isinstance(module, SparseFeedForward):
            module.set_parallel_axes(mesh.ep, None)

    if gather and sizes.num_data_ranks > 1:
        _shard_over_data_ranks(model, mesh, layouts, bfloat16=bfloat16)
    return layouts


def _shard_over_data_ranks(
    model: SparseHost, mesh: Mesh, layouts: dict[str, Layout], *, bfloat16: bool
) -> None:
    """Makes the model, its blocks, and their experts and routers units of FSDP."""
    module = cast(nn.Module, model)
    dims: dict[nn.Parameter, int] = {}
    for name, parameter in module.named_parameters():
        dims[parameter] = layouts[name].shard_dim

    for decoder in (False, True):
        stack = model.host.stack_module(module, decoder=decoder)
        for block in getattr(stack, model.host.stack(decoder=decoder).blocks):
            layers = [part for part in block.modules() if isinstance(part, SparseFeedForward)]
            layer = layers[0] if layers else None
            shard_block(block, layer, mesh, dims, bfloat16=bfloat16)
    shard_unit(module, mesh, dims, experts=False, bfloat16=False)


def save_host(model: Any, layouts: dict[str, Layout], folder: Path | str) -> None:
    """Saves a host on a mesh for `load_model`; every rank must call it.

    Rank 0 gathers the whole model in the memory of its CPU.

    Args:
        model: A result of `shard_host`.
        layouts: Layouts of its parameters.
        folder: Exists.
    """
    weights = {}
    for name, tensor in stored_tensors(model).items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if is_rank_zero():
            # Gate and up projection are one parameter again.
            is_apart = name in layouts and layouts[name].rule == "experts in" and whole.dim() == 4
            weights[name] = (whole.flatten(1, 2) if is_apart else whole).cpu()

    def write() -> None:
        model.save_pretrained(folder, state_dict=weights)
        write_weight_sums(Path(folder))

    broadcast_from_rank_zero(write)
