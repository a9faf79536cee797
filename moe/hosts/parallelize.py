"""A host on a mesh: experts over `ep`, everything else sharded by FSDP or whole."""

from typing import Any

from moe.checks import check
from moe.distributed.mesh import Mesh
from moe.distributed.sharding import Layout, Rule, distribute_parameters, find_layout
from moe.errors import ConfigError
from moe.hosts.blocks import SparseBlock
from moe.hosts.model import SparseHost
from moe.models.parallelize import shard_over_data_ranks
from moe.sparse.editing import STACKS, sparse_layers

RULES = (Rule("experts", r".*\.sparse\.experts\.\w+", expert=True), Rule("host", r".*"))
"""They cover every parameter of a host."""


def shard_host(
    model: Any, mesh: Mesh, *, bfloat16: bool = False, gather: bool = True
) -> dict[str, Layout]:
    """Shards a host with sparse layers over a mesh, and returns the layout of each parameter.

    Gradients are summed over ranks, not averaged: give each call `num_items_in_batch`, the targets
    of all ranks. Then losses and gradients are those of one process.

    Args:
        model: The model, whole and equal on all ranks.
        mesh: The ranks; without `tp`, since the host's attention is not sharded.
        bfloat16: Whether the parameters of blocks are gathered in bfloat16, for autocast; with
            torch's LayerNorm only on a GPU.
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
    layers = sparse_layers(model).values()
    for layer in layers:
        num_experts = layer.config.num_experts
        expected = f"a divisor of the {num_experts} experts"
        check(num_experts % sizes.ep == 0, "ep of the mesh", sizes.ep, expected)

    for stack in STACKS:
        layerdrop = getattr(model.host.stack(model, stack), "layerdrop", 0.0)
        expected = "0 in both stacks, since ranks that skip different layers wait for one another"
        check(not (gather and layerdrop), "layerdrop", layerdrop, expected)

    layouts: dict[str, Layout] = {}
    for name, parameter in model.named_parameters():
        layout = find_layout(name, parameter.shape, RULES, sizes)
        layouts[name] = layout if gather else layout._replace(num_shards=1)
    distribute_parameters(model, layouts, mesh)
    model.mesh_config = sizes
    for layer in layers:
        layer.set_parallel_axes(mesh.ep, None)

    if gather and sizes.num_data_ranks > 1:
        shard_over_data_ranks(model, SparseBlock, mesh, layouts, bfloat16=bfloat16)
    return layouts
