"""Builds a model from a recipe on the running ranks: checks and builds the mesh, draws or reads weights.

`stmoe pretrain` builds a new model, `stmoe finetune` loads a pretrained one; loop.py trains it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerFast

from moe.checkpoint.loading import check_model_folder, load_model, load_model_on_mesh
from moe.checks import check
from moe.data.tokenizer import load_tokenizer
from moe.distributed.mesh import Mesh, build_mesh, check_mesh
from moe.distributed.sharding import Layout, MeshCoordinate, Rule, find_layout
from moe.errors import ConfigError
from moe.models.configuration import STMoEConfig
from moe.models.lora import lora_config
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.parallelize import draw_weights, mesh_limits, model_layouts, shard_model
from moe.models.pretrained import enable_activation_checkpointing
from moe.sparse.groups import common_num_groups, tokens_per_group
from moe.training.recipe import SETTINGS_WITHOUT_WEIGHTS, FinetuneRecipe, PretrainRecipe, Recipe
from moe.training.step import check_groups

# Fields that continued pre-training may change: routers differ in how they use the scores of the same
# gate.
MAY_CHANGE = SETTINGS_WITHOUT_WEIGHTS | {"router", "decoder_router"}

# They only affect how fresh weights are drawn.
_WITHOUT_EFFECT = frozenset({"initializer_scale", "router_initializer_std"})


class BuiltModel(NamedTuple):
    """A model on its device or mesh.

    Attributes:
        model: The model; on a mesh this rank's shards of it.
        layouts: Layout of each parameter by name.
        mesh: None for one process.
    """

    model: STMoEForConditionalGeneration
    layouts: dict[str, Layout]
    mesh: Mesh | None


def check_run_fits(
    recipe: Recipe, config: STMoEConfig, num_ranks: int, lengths: Sequence[int] | None
) -> None:
    """Raises if the run does not fit the mesh, before anything is allocated.

    Args:
        recipe: Has the mesh and the sizes of batches.
        config: Configuration of the model, or of a host.
        num_ranks: Ranks that this launch has started.
        lengths: Tokens of a row in the encoder and the decoder; None if batches differ.

    Raises:
        ConfigError: With the numbers and possible values.
    """
    if not isinstance(config, STMoEConfig):
        ranks = recipe.mesh.num_ranks
        check(num_ranks == ranks, "The number of processes", num_ranks, f"{ranks} of the mesh")
        return

    # The data ranks share the groups of the whole batch evenly, in both stacks.
    batch_size = recipe.training.batch_size
    group_size = tokens_per_group(config)
    routed_lengths = lengths if config.all_sparse_configs() else None
    num_groups = None
    if routed_lengths:
        num_groups = common_num_groups(routed_lengths, batch_size, group_size)

    # Replicas that may be lost are launched separately.
    num_ranks *= recipe.mesh.num_ranks // recipe.mesh.launched.num_ranks
    limits = mesh_limits(config, num_ranks, num_groups)
    check_mesh(recipe.mesh, limits)

    # Check that a forward pass of one rank forms the same groups as the whole batch would.
    if routed_lengths:
        rows_of_rank = batch_size // recipe.mesh.num_data_ranks
        rows_of_pass = recipe.training.micro_batch_size or rows_of_rank
        check_groups(routed_lengths, batch_size, rows_of_pass, group_size)


def check_continues(folder: Path, config: STMoEConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raises for a model that pre-training cannot continue from.

    Args:
        folder: A model saved by `save_pretrained`.
        config: Config of the recipe, which describes the whole model.
        tokenizer: Tokenizer of the run.

    Raises:
        CheckpointError: When the folder holds no model.
        ConfigError: When the recipe has another architecture or the run another tokenizer; names
            what differs.
    """
    check_model_folder(folder)
    saved = STMoEConfig.from_pretrained(folder)
    differing: list[str] = []
    for name in sorted(PretrainRecipe.model_fields - MAY_CHANGE - _WITHOUT_EFFECT):
        given = getattr(config, name)
        present = getattr(saved, name)
        if given != present:
            differing.append(f"model.{name} is {given!r}, the model has {present!r}")
    if differing:
        raise ConfigError(
            f"The model in {folder} does not match the recipe: {'; '.join(differing)}. Give the recipe that it was "
            "trained with, or these settings."
        )

    # With another vocabulary, every row of the embedding would belong to another word.
    if load_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"The tokenizer does not belong to the model in {folder}, whose embeddings belong to its "
            f"own tokens. Give --tokenizer {folder}."
        )


def build_model(
    recipe: Recipe,
    config: Any,
    device_type: str,
    pretrained: Path | None = None,
    shard_host: Callable[..., dict[str, Layout]] | None = None,
) -> BuiltModel:
    """Returns the model of a run on its device, or sharded over the mesh that it builds.

    A recipe whose `parameters` are `lora` attaches adapters to the pretrained model.

    Args:
        recipe: Gives mesh, seed and precision.
        config: Configuration of the model, or of a host, which is loaded whole.
        device_type: `cpu` or `cuda`.
        pretrained: Folder of the weights. Counters of routers start at zero if it has another kind
            of router. None draws weights, which depend on the seed but not on the mesh.
        shard_host: The function of moe.hosts; None where there are no hosts.

    Raises:
        CheckpointError: When the folder's weights are not complete.
    """
    launched = recipe.mesh.launched
    mesh = build_mesh(launched, device_type) if launched.num_ranks > 1 else None
    coordinate = MeshCoordinate(0, 0, 0, 0) if mesh is None else MeshCoordinate.of(mesh)
    bfloat16 = recipe.training.precision == "bfloat16"

    if pretrained is None:
        with torch.device("meta"):
            model = STMoEForConditionalGeneration(config)

        # Sharded before it has memory, which is allocated only for this rank's shards.
        if mesh is None:
            layouts = model_layouts(model, config, launched)
        else:
            layouts = shard_model(model, mesh, bfloat16=bfloat16)
        model.to_empty(device=device_type)
        model.tie_weights()
        draw_weights(model, recipe.seed, layouts, launched, coordinate)
    elif not isinstance(config, STMoEConfig):
        model = load_model(pretrained, device=device_type, config=config, dtype=torch.float32)
        layouts = {}
        for name, parameter in model.named_parameters():
            layouts[name] = find_layout(name, parameter.shape, [Rule("host", ".*")], launched)
        if mesh is not None:
            assert shard_host is not None, "the command knows hosts"
            layouts = shard_host(model, mesh, bfloat16=bfloat16)
    else:
        saved = STMoEConfig.from_pretrained(pretrained)
        begins_anew = _state_of_changed_routers(saved, config)
        attach = partial(_attach_adapters, recipe=recipe, base=pretrained)
        settings: dict[str, Any] = {"config": config, "begins_anew": begins_anew}
        if mesh is None:
            model = load_model(pretrained, device=device_type, **settings)
            attach(model)
            layouts = model_layouts(model, config, launched)
        else:
            settings |= {"bfloat16": bfloat16, "attach": attach}
            model, layouts = load_model_on_mesh(pretrained, mesh, **settings)

        # Of adapters that are attached, A is drawn as in PEFT, and B is 0.
        factors = {name: layout for name, layout in layouts.items() if ".lora_A." in name}
        draw_weights(model, recipe.seed, factors, launched, coordinate)

    if recipe.training.activation_checkpointing:
        enable_activation_checkpointing(model, {"use_reentrant": False})
    if recipe.training.compile:
        model.compile()
    return BuiltModel(model, layouts, mesh)


def _attach_adapters(model: STMoEForConditionalGeneration, recipe: Recipe, base: Path) -> None:
    """Attaches the adapters of a recipe, if they train, to a model, whole or without memory."""
    if isinstance(recipe, FinetuneRecipe) and recipe.parameters == "lora":
        settings = dataclasses.asdict(recipe.lora)
        adapters = lora_config(model, lora_dropout=settings.pop("dropout"), **settings)
        model.add_adapter(adapters)
        adapters.base_model_name_or_path = str(base.absolute())


def _state_of_changed_routers(saved: STMoEConfig, config: STMoEConfig) -> Callable[[str], bool]:
    """Returns a predicate that is true for counters of routers whose kind changes."""
    changed: list[str] = []
    if saved.router != config.router:
        changed.append(".encoder.")
    if (saved.decoder_router or saved.router) != (config.decoder_router or config.router):
        changed.append(".decoder.")

    def begins_anew(name: str) -> bool:
        return name.endswith(".load_steps") and any(stack in name for stack in changed)

    return begins_anew
