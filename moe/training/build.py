"""From a recipe and the running ranks to a model in its place: the mesh checked, built, the weights
drawn or read.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from moe.checkpoint.loading import load_complete, load_model_on_mesh
from moe.distributed.mesh import Mesh, MeshConfig, build_mesh, check_mesh
from moe.distributed.sharding import Layout, MeshCoordinate
from moe.models.configuration import STMoEConfig
from moe.models.initial_weights import draw_weights
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.parallelize import mesh_limits, model_layouts, shard_model
from moe.sparse.groups import common_num_groups, tokens_per_group
from moe.training.recipe import Recipe
from moe.training.step import check_groups


class PlacedModel(NamedTuple):
    """A model on its device or mesh.

    Attributes:
        model: On a mesh this rank's part.
        layouts: Where each parameter lies, by name.
        mesh: None for one process.
    """

    model: STMoEForConditionalGeneration
    layouts: dict[str, Layout]
    mesh: Mesh | None


def check_placement(
    recipe: Recipe, config: STMoEConfig, num_ranks: int, lengths: Sequence[int] | None
) -> None:
    """Refuses a mesh on which the run would not fit, before anything is allocated.

    Args:
        recipe: Gives the mesh and the sizes of batches.
        config: Of the model.
        num_ranks: Ranks that are running.
        lengths: Tokens of a row in the encoder and the decoder; None when batches differ.

    Raises:
        ConfigError: With the numbers and what would fit.
    """
    rows, micro = recipe.training.batch_size, recipe.training.micro_batch_size
    sparse = config.num_sparse_encoder_layers or config.num_sparse_decoder_layers
    num_groups = None
    if lengths is not None and sparse:
        num_groups = common_num_groups(lengths, rows, tokens_per_group(config))
    check_mesh(recipe.mesh, mesh_limits(config, num_ranks, num_groups))
    if lengths is not None and sparse:
        check_groups(
            lengths, rows, micro or rows // recipe.mesh.num_data_ranks, tokens_per_group(config)
        )


def new_model(recipe: Recipe, config: STMoEConfig, device_type: str) -> PlacedModel:
    """Returns a model with initial weights; they depend on the seed alone, not on the mesh."""
    with torch.device("meta"):
        model = STMoEForConditionalGeneration(config)
    if recipe.mesh.num_ranks == 1:
        mesh, layouts = None, model_layouts(model, config, recipe.mesh)
    else:
        mesh = build_mesh(recipe.mesh, device_type)
        layouts = shard_model(model, mesh, bfloat16=_in_bfloat16(recipe))
    model.to_empty(device=_device(device_type))
    model.tie_weights()
    sizes, place = (
        (mesh.config, MeshCoordinate.of(mesh))
        if mesh
        else (MeshConfig(), MeshCoordinate(0, 0, 0, 0))
    )
    draw_weights(model, recipe.seed, layouts, sizes, place)
    return PlacedModel(_prepare(model, recipe), layouts, mesh)


def pretrained_model(
    recipe: Recipe, config: STMoEConfig, folder: Path, device_type: str
) -> PlacedModel:
    """Returns the model of a folder with the settings of `config`.

    Raises:
        CheckpointError: When the folder's weights are not complete.
    """
    if recipe.mesh.num_ranks == 1:
        model, mesh = load_complete(STMoEForConditionalGeneration, folder, config=config), None
        layouts = model_layouts(model, config, recipe.mesh)
        torch.nn.Module.to(model, _device(device_type))
    else:
        mesh = build_mesh(recipe.mesh, device_type)
        model, layouts = load_model_on_mesh(
            folder, mesh, config=config, bfloat16=_in_bfloat16(recipe)
        )
    return PlacedModel(_prepare(model, recipe), layouts, mesh)


def _in_bfloat16(recipe: Recipe) -> bool:
    """Returns whether parameters travel in bfloat16."""
    return recipe.training.precision == "bfloat16"


def _prepare(model: STMoEForConditionalGeneration, recipe: Recipe) -> STMoEForConditionalGeneration:
    """Returns the model with the settings of training that are no weights."""
    if recipe.training.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def _device(device_type: str) -> torch.device:
    """Returns this rank's device."""
    return (
        torch.device(device_type, torch.cuda.current_device())
        if device_type == "cuda"
        else torch.device("cpu")
    )
