"""Loads models completely: every weight comes from the folder, or loading fails."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME

from moe.checkpoint.sharded_weights import stored_tensors
from moe.checks import shown
from moe.distributed.collectives import gather_or_raise
from moe.distributed.mesh import Mesh
from moe.distributed.sharding import Layout, MeshCoordinate, copy_shard, local_shard
from moe.errors import CheckpointError, MoEError
from moe.files import find_model
from moe.kernels.quantized_weight import QuantizedWeight
from moe.models.adapter_files import attach_saved_adapters, find_base, stored_name
from moe.models.card import find_source_model
from moe.models.checkpoint_formats import read_json_object
from moe.models.configuration import STMoEConfig
from moe.models.configuration_checks import refuse_quantized
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.parallelize import shard_model
from moe.models.pretrained import STMoEPreTrainedModel, align_weights, refuse_not_finite
from moe.models.transformers_private import load_generation_config
from moe.models.weight_files import (
    LazyTensor,
    check_weights,
    check_weights_together,
    describe_misfits,
    describe_reshaped,
    find_weight_files,
    incomplete,
    keep_quantized_experts,
    open_weights,
)
from moe.sparse.experts import Experts


def _no_tensor(name: str) -> bool:
    return False


def load_model(
    source: Path | str,
    *,
    mesh: Mesh | None = None,
    device: torch.device | str | None = None,
    dropless: bool = False,
    mmap: bool = False,
    model_class: Any = None,
    begins_anew: Callable[[str], bool] = _no_tensor,
    **options: Any,
) -> Any:
    """Returns a model of this library, one that it converts, or a host, in evaluation mode.

    All weights match. `from_pretrained` alone initialises missing weights at random and skips unknown
    ones, with a warning: right for a new head, wrong for training or measuring a saved model.

    Args:
        source: `names`, which comes with the library, a folder, or a name of the hub.
        mesh: Ranks that share the experts of a model of ours in a folder, each of which keeps all
            other weights; None for the whole model. See `load_model_on_mesh` for training.
        device: Device of the weights, without a mesh; None for the CPU.
        dropless: Whether experts have unlimited capacity in evaluation, regardless of config.json.
        mmap: Whether weights stay in their files until they are used, for a folder of ours or of a
            host, on a CPU. The system reads the pages that a product needs, and a token reads only its own
            experts, so the model may be larger than memory. The numbers are not checked.
        model_class: Class of transformers with `from_pretrained`, including Auto classes; None for
            the one that `model_type` names.
        begins_anew: Whether a tensor of this name may be missing, and then starts at zero, or be
            left out.
        options: Arguments of `from_pretrained`, e.g. `dtype`; with `mesh` or `mmap` only fields of
            the configuration that differ.

    Raises:
        CheckpointError: When there is no such model, or weights are missing, unexpected, damaged or
            of another shape; lists them.
        ConfigError: When a setting is invalid, or experts are quantized and `mesh` is given.
    """
    source = find_model(source)
    of_source = model_class or find_class(source, **options)
    if dropless:
        options |= _unlimited_capacity(of_source, source)
    if mesh is not None:
        config = STMoEConfig.from_pretrained(source, dispatch="ragged", **options)
        return load_model_on_mesh(source, mesh, config=config, gather=False)[0]
    if mmap:
        return _load_mapped(of_source, source, **options)
    model: Any
    if isinstance(source, Path) or Path(source).is_dir():
        model = _load_whole(of_source, source, begins_anew, options)
    else:
        model = of_source.from_pretrained(source, **options)
    is_ours = isinstance(model, STMoEPreTrainedModel)
    if model_class is None and not is_ours:  # ours does both itself
        refuse_not_finite(model, source)
        align_weights(model)
    return model if device is None else model.to(device)


HOST_CLASSES: dict[str, Any] = {}
"""Classes of other Transformers, dense or with sparse layers, by `model_type`; moe.hosts fills it."""


def find_class(source: Path | str, **download: Any) -> Any:
    """Returns the class of a model: a host's, dense or sparse, or else ours.

    Args:
        source: A folder, or a string that may also be a name of the hub.
        download: `revision`, `token`, `cache_dir` and the like.

    Raises:
        CheckpointError: When a folder has no config.json, or one without a `model_type`.
    """
    if isinstance(source, Path) or Path(source).is_dir():
        model_type = check_model_folder(source)
    else:
        model_type = STMoEConfig.read_raw(source, **download).get("model_type")
    return HOST_CLASSES.get(str(model_type), STMoEForConditionalGeneration)


def empty_model(config: PreTrainedConfig) -> Any:
    """Returns a model without memory, of the class that belongs to its configuration: a host's or ours."""
    model_class = HOST_CLASSES.get(config.model_type, STMoEForConditionalGeneration)
    with torch.device("meta"):
        return model_class(config)


def _unlimited_capacity(model_class: Any, source: Path | str) -> dict[str, Any]:
    """Returns the fields of a model's configuration with which evaluation drops no token."""
    # Both names of the capacity: ours, and the one of Switch in transformers.
    fields = {"eval_capacity_factor": None, "expert_capacity": None}
    if model_class is STMoEForConditionalGeneration:
        return fields
    settings = getattr(model_class.config_class.from_pretrained(source), "sparse_layers", None)
    if settings is None:
        return {}  # dense hosts have none
    return {"sparse_layers": {**settings, "layer": {**settings.get("layer", {}), **fields}}}


def _load_whole(
    model_class: Any,
    folder: Path | str,
    begins_anew: Callable[[str], bool],
    options: dict[str, Any],
    *,
    check_sums: bool = True,
) -> Any:
    """Returns the model of a folder on the CPU."""
    # Our own classes check sums in `from_pretrained`.
    is_ours = check_model_folder(folder) == STMoEConfig.model_type
    if check_sums and not is_ours and not issubclass(model_class, STMoEPreTrainedModel):
        check_weights(Path(folder))
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        model, info = model_class.from_pretrained(folder, **options)
    except MoEError:
        raise
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"The model in {folder} cannot be loaded: {error}") from error

    # Older versions of transformers saved tables of positions, which the class computes itself.
    unexpected = set(info["unexpected_keys"]) - {name for name, _ in model.named_buffers()}
    misfits = describe_misfits(
        sorted(itertools.filterfalse(begins_anew, info["missing_keys"])),
        sorted(itertools.filterfalse(begins_anew, unexpected)),
        sorted(itertools.starmap(describe_reshaped, info["mismatched_keys"])),
    )
    if misfits:
        raise CheckpointError(incomplete(folder, type(model).__name__, misfits))
    return model


def load_model_on_mesh(
    folder: Path | str,
    mesh: Mesh,
    *,
    config: STMoEConfig | None = None,
    bfloat16: bool = False,
    gather: bool = True,
    begins_anew: Callable[[str], bool] = _no_tensor,
    attach: Callable[[STMoEForConditionalGeneration], None] | None = None,
) -> tuple[STMoEForConditionalGeneration, dict[str, Layout]]:
    """Returns the model of a folder sharded over a mesh, and the layouts of its parameters.

    Equivalent to `load_model` followed by `shard_model`, but a rank reads and holds only its own
    shards. A model with quantized experts is loaded whole by a single rank, without layouts.

    Args:
        folder: A model saved by `save_pretrained` or `write_model`, which all ranks see.
        mesh: The ranks.
        config: With settings that differ from the folder's; None for the folder's.
        bfloat16: See `shard_model`.
        gather: See `shard_model`.
        begins_anew: See `load_model`.
        attach: Attaches new adapters to the model before it is sharded; their numbers are then 0. None for none.

    Raises:
        CheckpointError: When the folder holds no such model, or weights are missing, unexpected or
            of another shape; lists them, before any memory is allocated.
        ConfigError: When experts are quantized, and there are several ranks.
    """
    _check_class(folder, STMoEForConditionalGeneration, "loaded on a mesh")
    config = config or STMoEConfig.from_pretrained(folder)
    if config.expert_quantization is not None and mesh.config.num_ranks == 1:
        return load_model(folder, config=config), {}
    refuse_quantized(config, "sharded over ranks", folder)
    check_weights_together(Path(find_base(folder) or folder))
    model, saved = _empty_model(folder, config, begins_anew)

    # Sharded before it has memory, so that a rank allocates only its shards.
    if attach is not None:
        attach(model)
    torch.nn.Module.to(model, dtype=_float_dtype(config, saved))
    layouts = shard_model(model, mesh, bfloat16=bfloat16, gather=gather)
    model.to_empty(device=mesh.device_mesh.device_type)
    model.tie_weights()

    coordinate = MeshCoordinate.of(mesh)
    for name, tensor in stored_tensors(model).items():
        shard = local_shard(tensor).detach()
        stored = saved.get(stored_name(name))
        if stored is None:
            shard.zero_()
        elif name in layouts:
            copy_shard(stored.read(), shard, layouts[name], mesh.config, coordinate)
        else:
            shard.copy_(stored.read())

    gather_or_raise(lambda: refuse_not_finite(model, folder))
    return _finished(model, folder), layouts


def _load_mapped(model_class: Any, folder: Path | str, **fields: Any) -> Any:
    """Returns a model whose weights stay in their files."""
    _check_class(folder, model_class, "mapped")
    if not issubclass(model_class, STMoEPreTrainedModel):
        # transformers leaves weights in safetensors files where they are.
        options = {**fields, "use_safetensors": True}
        model = _load_whole(model_class, folder, _no_tensor, options, check_sums=False)
        return _without_copies(model)

    config = STMoEConfig.from_pretrained(folder, **fields)
    model, saved = _empty_model(folder, config, _no_tensor)
    if config.expert_quantization is not None:
        saved = keep_quantized_experts(saved)
    weights = {name: saved[stored_name(name)].read() for name in stored_tensors(model)}  # no copy

    # from_pretrained converts all down projections of float16; here experts are, one at a time.
    for name, weight in weights.items():
        if weight.dtype == torch.float16 and name.endswith(".feed_forward.down_proj.weight"):
            weights[name] = weight.float()
    for module in model.modules():
        if isinstance(module, Experts):
            module.widens_float16 = True
    model.load_state_dict(weights, assign=True, strict=False)
    model.tie_weights()
    return _without_copies(_finished(model, folder))


def _without_copies(model: Any) -> Any:
    """Returns a mapped model as a constant that makes no copies of its experts."""
    for weight in model.parameters():
        if isinstance(weight, QuantizedWeight):
            weight.packed_experts = None
    return model.requires_grad_(False)


def _finished(
    model: STMoEForConditionalGeneration, folder: Path | str
) -> STMoEForConditionalGeneration:
    """Returns a model that has its weights, with all else of its folder, in evaluation mode."""
    if (Path(folder) / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = load_generation_config(folder, {})
    model.config.name_or_path = str(folder)
    model.source_model = find_source_model(folder)
    return model.eval()


def describe_shape_misfits(
    stored: Mapping[str, Iterable[int]], expected: Mapping[str, Tensor]
) -> str:
    """Returns which stored tensors do not match a model; empty if all match.

    Args:
        stored: Shapes of the stored tensors, by name.
        expected: Tensors <any>[...] of the model, by name; they need no memory.
    """
    reshaped = []
    for name in sorted(stored.keys() & expected.keys()):
        if tuple(stored[name]) != tuple(expected[name].shape):
            reshaped.append(describe_reshaped(name, stored[name], expected[name].shape))
    missing = sorted(expected.keys() - stored.keys())
    unexpected = sorted(stored.keys() - expected.keys())
    return describe_misfits(missing, unexpected, reshaped)


def check_model_folder(folder: Path | str) -> str:
    """Returns the `model_type` of the model in `folder`.

    Raises:
        CheckpointError: When it has no config.json, or one without a `model_type`.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} holds no model: it has no config.json. Give a folder made by save_pretrained, e.g. the model/ "
            "folder of a run."
        )

    # Without a type every setting would have its default, and a model of another size would be built
    # first.
    advice = "Copy the whole folder again from where it was saved."
    model_type = read_json_object(path, advice=advice).get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(
            f"{path}: model_type is {shown(model_type)}; expected a text such as 'st_moe'. {advice}"
        )
    return model_type


def _check_class(folder: Path | str, model_class: Any, what: str) -> None:
    """Raises a CheckpointError unless a folder holds the format of a class; `what` only such a model can be."""
    model_type = check_model_folder(folder)
    expected = model_class.config_class.model_type
    if model_type != expected:
        raise CheckpointError(
            f"{folder} holds a model of type {model_type!r}, but only {expected!r} can be {what}. "
            f"Convert it first: stmoe convert --from {folder} --to OUT."
        )


def _empty_model(
    folder: Path | str, config: STMoEConfig, begins_anew: Callable[[str], bool]
) -> tuple[STMoEForConditionalGeneration, dict[str, LazyTensor]]:
    """Returns a model without memory, and the weights in its folder, which are exactly its tensors.

    Raises:
        CheckpointError: Lists what does not fit.
    """
    base = find_base(folder)
    saved = open_weights(find_weight_files(base or folder, use_safetensors=True))
    model = empty_model(config)
    if base is not None:
        saved |= attach_saved_adapters(model, folder)
    expected = {stored_name(name): tensor for name, tensor in stored_tensors(model).items()}
    shapes = {name: tensor.shape for name, tensor in saved.items()}

    for name in expected.keys() ^ shapes.keys():
        if begins_anew(name):
            expected.pop(name, None)
            shapes.pop(name, None)
    misfits = describe_shape_misfits(shapes, expected)
    if misfits:
        raise CheckpointError(incomplete(folder, type(model).__name__, misfits))
    return model, saved


def _float_dtype(config: STMoEConfig, saved: Mapping[str, LazyTensor]) -> torch.dtype:
    """Returns the dtype of floating-point weights: the config's, or else the files'."""
    if config.dtype is not None:
        return getattr(torch, config.dtype) if isinstance(config.dtype, str) else config.dtype
    dtypes = (tensor.dtype for tensor in saved.values() if tensor.is_floating_point())
    return next(dtypes, torch.float32)
