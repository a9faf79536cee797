"""Loads models completely: every weight comes from the folder, or loading fails."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.utils import GENERATION_CONFIG_NAME

from moe.checkpoint.sharded_weights import stored_tensors, whole_slices
from moe.checks import shown
from moe.distributed.collectives import gather_or_raise
from moe.distributed.mesh import Mesh
from moe.distributed.sharding import Layout, MeshCoordinate, ShardSlices, local_shard, shard_slices
from moe.errors import CheckpointError, MoEError
from moe.models.card import find_source_model
from moe.models.checkpoint_formats import read_json_object
from moe.models.configuration import STMoEConfig
from moe.models.configuration_checks import refuse_quantized
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.parallelize import shard_model
from moe.models.pretrained import STMoEPreTrainedModel, refuse_not_finite
from moe.models.transformers_private import load_generation_config
from moe.models.weight_files import (
    LazyTensor,
    check_weights,
    check_weights_together,
    describe_misfits,
    describe_reshaped,
    find_weight_files,
    incomplete,
    open_weights,
    refuse_integers,
)


def _no_tensor(name: str) -> bool:
    return False


def load_complete(
    model_class: Any,
    folder: Path | str,
    *,
    begins_anew: Callable[[str], bool] = _no_tensor,
    **options: Any,
) -> Any:
    """Returns the model of a folder, checking that all weights match.

    `from_pretrained` alone initialises missing weights at random and skips unknown ones, with a
    warning: right for a new head, wrong for training or measuring a saved model.

    Args:
        model_class: Any class of transformers with `from_pretrained`, including Auto classes.
        folder: A model saved by `save_pretrained`.
        begins_anew: Whether a tensor of this name may be missing, and then starts at zero, or be
            left out.
        options: Further arguments of `from_pretrained`.

    Raises:
        CheckpointError: When the folder holds no such model, or weights are missing, unexpected or
            of another shape; lists them.
    """
    # Our own classes check sums in `from_pretrained`.
    is_ours = check_model_folder(folder) == STMoEConfig.model_type
    stored: dict[str, LazyTensor] = {}
    if not is_ours and not issubclass(model_class, STMoEPreTrainedModel):
        check_weights(Path(folder))
        choice = {name: options.get(name) for name in ("use_safetensors", "variant")}
        stored = open_weights(find_weight_files(folder, **choice))
    options["output_loading_info"] = True
    options["ignore_mismatched_sizes"] = True
    try:
        model, info = model_class.from_pretrained(folder, **options)
    except MoEError:
        raise
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"The model in {folder} cannot be loaded: {error}") from error

    misfits = describe_misfits(
        sorted(itertools.filterfalse(begins_anew, info["missing_keys"])),
        sorted(itertools.filterfalse(begins_anew, info["unexpected_keys"])),
        sorted(itertools.starmap(describe_reshaped, info["mismatched_keys"])),
    )
    if misfits:
        raise CheckpointError(incomplete(folder, type(model).__name__, misfits))
    if getattr(model, "hf_quantizer", None) is None:
        refuse_integers(folder, model.state_dict(), stored)
    return model


def load_model_on_mesh(
    folder: Path | str,
    mesh: Mesh,
    *,
    config: STMoEConfig | None = None,
    bfloat16: bool = False,
    gather: bool = True,
    begins_anew: Callable[[str], bool] = _no_tensor,
) -> tuple[STMoEForConditionalGeneration, dict[str, Layout]]:
    """Returns the model of a folder sharded over a mesh, and the layouts of its parameters.

    Equivalent to `load_complete` followed by `shard_model`, but a rank reads and holds only its own
    shards. A model with quantized experts is loaded whole by a single rank, without layouts.

    Args:
        folder: A model saved by `save_pretrained` or `write_model`, which all ranks see.
        mesh: The ranks.
        config: With settings that differ from the folder's; None for the folder's.
        bfloat16: See `shard_model`.
        gather: See `shard_model`.
        begins_anew: See `load_complete`.

    Raises:
        CheckpointError: When the folder holds no such model, or weights are missing, unexpected or
            of another shape; lists them, before any memory is allocated.
        ConfigError: When experts are quantized, and there are several ranks.
    """
    _check_is_ours(folder, "on a mesh only {} can be loaded")
    config = config or STMoEConfig.from_pretrained(folder)
    if config.expert_quantization is not None and mesh.config.num_ranks == 1:
        return load_complete(STMoEForConditionalGeneration, folder, config=config), {}
    refuse_quantized(config, "sharded over ranks", folder)
    check_weights_together(Path(folder))

    saved = open_weights(find_weight_files(folder, use_safetensors=True))
    with torch.device("meta"):
        model = STMoEForConditionalGeneration(config)
    _check_weights_fit(folder, model, saved, begins_anew)

    # Sharded before it has memory, so that a rank allocates only its shards.
    torch.nn.Module.to(model, dtype=_float_dtype(config, saved))
    layouts = shard_model(model, mesh, bfloat16=bfloat16, gather=gather)
    model.to_empty(device=local_device(mesh.device_mesh.device_type))
    model.tie_weights()

    coordinate = MeshCoordinate.of(mesh)
    for name, tensor in stored_tensors(model).items():
        if name not in saved:
            tensor.zero_()
            continue
        slices = whole_slices(tensor.shape)
        if name in layouts:
            slices = shard_slices(layouts[name], mesh.config, coordinate)
        _read_slices(saved[name].read(), slices, local_shard(tensor))

    gather_or_raise(lambda: refuse_not_finite(model, folder))
    return _finished(model, folder), layouts


def load_mapped(folder: Path | str, **fields: Any) -> STMoEForConditionalGeneration:
    """Returns a model on the CPU whose weights stay in their files until they are used.

    The system reads the pages that a product needs, and drops them when memory is short. A token
    reads only its own experts, so the model may be larger than memory. The numbers are not checked.

    Args:
        folder: A model saved by `save_pretrained` or `write_model`, in safetensors.
        fields: Fields of STMoEConfig that differ from the folder's.

    Raises:
        CheckpointError: When the folder holds no such model, or weights are missing, unexpected or
            of another shape.
        ConfigError: When experts are quantized.
    """
    _check_is_ours(folder, "only {} can be mapped")
    config = STMoEConfig.from_pretrained(folder, **fields)
    refuse_quantized(config, "mapped", folder)
    with torch.device("meta"):
        model = STMoEForConditionalGeneration(config)
    saved = open_weights(find_weight_files(folder, use_safetensors=True))
    _check_weights_fit(folder, model, saved, _no_tensor)
    weights = {name: tensor.read() for name, tensor in saved.items()}  # without a copy

    # from_pretrained converts all down projections of float16; here experts are, one at a time.
    for name, weight in weights.items():
        if weight.dtype == torch.float16 and name.endswith(".feed_forward.down_proj.weight"):
            weights[name] = weight.float()
    for layer in model.sparse_layers():
        layer.experts.widens_float16 = True
    model.load_state_dict(weights, assign=True, strict=False)
    model.tie_weights()
    return _finished(model, folder).requires_grad_(False)


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


def _check_is_ours(folder: Path | str, limit: str) -> None:
    """Raises a CheckpointError unless a folder holds a model of ours.

    Args:
        folder: The folder.
        limit: Clause on what only a model of ours can do; {} stands for our type of model.
    """
    model_type = check_model_folder(folder)
    if model_type != STMoEConfig.model_type:
        raise CheckpointError(
            f"{folder} holds a model of type {model_type!r}, but {limit.format(repr(STMoEConfig.model_type))}. Convert "
            f"it first: stmoe convert --from {folder} --to OUT."
        )


def _check_weights_fit(
    folder: Path | str,
    model: STMoEForConditionalGeneration,
    saved: Mapping[str, LazyTensor],
    begins_anew: Callable[[str], bool],
) -> None:
    """Raises unless the files hold exactly the tensors of a model, with floating-point weights.

    Raises:
        CheckpointError: Lists what does not fit.
    """
    expected = stored_tensors(model)
    shapes = {name: tensor.shape for name, tensor in saved.items()}

    # Integers would be read as if they were the weights.
    refuse_integers(folder, expected, saved)
    for name in expected.keys() ^ shapes.keys():
        if begins_anew(name):
            expected.pop(name, None)
            shapes.pop(name, None)
    misfits = describe_shape_misfits(shapes, expected)
    if misfits:
        raise CheckpointError(incomplete(folder, type(model).__name__, misfits))


def local_device(device_type: str) -> torch.device:
    """Returns this rank's device of type `cuda` or `cpu`."""
    if device_type == "cuda":
        return torch.device(device_type, torch.cuda.current_device())
    return torch.device(device_type)


def _float_dtype(config: STMoEConfig, saved: Mapping[str, LazyTensor]) -> torch.dtype:
    """Returns the dtype of floating-point weights: the config's, or else the files'."""
    if config.dtype is not None:
        return getattr(torch, config.dtype) if isinstance(config.dtype, str) else config.dtype
    dtypes = (tensor.dtype for tensor in saved.values() if tensor.is_floating_point())
    return next(dtypes, torch.float32)


@torch.no_grad()
def _read_slices(saved: Tensor, slices: ShardSlices, target: Tensor) -> None:
    """Fills a tensor with a part of a saved one, of which only that part is read.

    Args:
        saved: The saved tensor <any>[...]; gate and up may share one dimension, [..., 2F, D].
        slices: The part; with gate and up apart, [..., 2, F, D], it has one dimension more.
        target: <any>[...] of the shape of the part.
    """
    if len(slices) > saved.dim():
        saved = saved.unflatten(-2, (2, -1))  # [..., 2F, D] -> [..., 2, F, D]
    target.copy_(saved[tuple(slice(start, end) for start, end in slices)])
