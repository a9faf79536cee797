"""Writes a checkpoint in another format, tensor by tensor.

Sources are transformers' T5 and Switch, T5X, ours and hosts; formats are ours, that of a host, and transformers' two.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import GenerationConfig

from moe.checkpoint.loading import HOST_CLASSES, empty_model
from moe.checkpoint.sharded_weights import begin_weights, write_tensor
from moe.checks import check, check_choice
from moe.convert.hf_config import Family, to_hf_config
from moe.convert.hf_weights import hf_weight_map, open_hf_checkpoint
from moe.convert.host_weights import open_host
from moe.convert.t5x import is_t5x, open_t5x
from moe.convert.weight_map import (
    ConversionReport,
    ConvertedCheckpoint,
    WeightMapping,
    convert_weights,
    empty_weights,
)
from moe.data.tokenizer import SENTENCEPIECE_FILE, TOKENIZER_FILE, load_tokenizer
from moe.errors import CheckpointError
from moe.models.adapter_files import attach_saved_adapters, find_base, is_adapter, stored_name
from moe.models.checkpoint_formats import find_format, read_json_object
from moe.models.configuration import STMoEConfig
from moe.models.configuration_checks import refuse_quantized
from moe.models.pretrained import DOWNLOAD, TOKENIZER_FILES
from moe.models.transformers_private import find_file, load_generation_config
from moe.models.weight_files import (
    LazyTensor,
    check_finite,
    find_weight_files,
    open_weights,
    write_weight_sums,
)

Format = Literal["ours", "switch", "t5"]
_FAMILY: Mapping[Format, Family] = {"switch": "switch_transformers", "t5": "t5"}


# ---------------------------------------------------------------------------
# Reading


def conversion_report(source: Path | str, **settings: Any) -> ConversionReport:
    """Returns how every tensor of a T5, Switch or T5X checkpoint would be converted.

    Args:
        source: A folder, or a name of the hub.
        settings: Fields of STMoEConfig that differ, and `revision`, `token`, `cache_dir` and the
            like.

    Raises:
        ConfigError: When it describes a model that this library cannot represent.
        CheckpointError: When there are no weights, or they are incomplete.
    """
    return open_checkpoint(source, dequantize=True, **settings).report


def open_checkpoint(
    source: Path | str, *, dequantize: bool = False, **settings: Any
) -> ConvertedCheckpoint:
    """Returns any checkpoint that this library reads, including ours, as weights of ours.

    See `conversion_report` for other arguments and errors.

    Args:
        source: The checkpoint; a folder of adapters is their base model with them merged.
        dequantize: Whether quantized experts are read as floats; otherwise they are refused.
        settings: Fields of STMoEConfig that differ, and where the hub's files are.
    """
    if is_t5x(source):
        return open_t5x(source, **settings)

    download = {name: settings.pop(name) for name in DOWNLOAD if name in settings}
    try:
        raw_config = STMoEConfig.read_raw(source, **download)
        model_type = str(raw_config.get("model_type"))
        config_class = getattr(HOST_CLASSES.get(model_type), "config_class", STMoEConfig)
        config = config_class.from_pretrained(source, **download)
    except OSError as error:
        if error.errno is not None:
            raise
        raise CheckpointError(" ".join(str(error).split())) from error
    if not dequantize:
        refuse_quantized(config, "changed", source)

    if hasattr(config, "replaced"):
        config = config.replaced(**settings, expert_quantization=None)
    else:
        check(not settings, f"Settings of a {model_type}", settings, "none: it is no sparse model")
    base = find_base(source, **download)
    if base is not None:
        checkpoint = open_checkpoint(base, dequantize=True)
        return merge_adapters(checkpoint._replace(config=config), source, **download)

    if model_type in HOST_CLASSES:
        return open_host(source, model_type, config, **download)
    if find_format(raw_config) is not None:
        return open_hf_checkpoint(source, raw_config, config, **download)

    # Ours: every weight is a tensor of the same name.
    stored = open_weights(find_weight_files(source, **download))
    weight_map = [WeightMapping(name, (name,)) for name in empty_weights(config)]
    return convert_weights(str(source), config, weight_map, stored, ignored={})


def merge_adapters(
    checkpoint: ConvertedCheckpoint, source: Path | str, **download: Any
) -> ConvertedCheckpoint:
    """Returns a base model with adapters added to its weights, each when it is read.

    Args:
        checkpoint: The base model, in floats.
        source: Folder or hub name of the adapters.
        download: `revision`, `token`, `cache_dir` and the like.
    """
    # PEFT's layers, around a model without memory.
    model = empty_model(checkpoint.config)
    stored = attach_saved_adapters(model, source, **download)
    factors = {n: stored[stored_name(n)].read() for n in model.state_dict() if is_adapter(n)}
    model.load_state_dict(factors, strict=False, assign=True)

    weights = dict(checkpoint.weights)
    for path, layer in model.named_modules():
        if hasattr(layer, "get_delta_weight"):
            leaf = getattr(layer, "parameter_name", "weight")
            name = stored_name(f"{path}.{leaf}")
            read = partial(_read_merged, weights[name], layer, leaf)
            weights[name] = LazyTensor(weights[name].shape, weights[name].dtype, read)
    return checkpoint._replace(weights=weights)


def _read_merged(weight: LazyTensor, layer: Any, name: str) -> Tensor:
    """Returns a weight <dtype>[..., O, I] plus the product of the factors in PEFT's layer."""
    # PEFT multiplies on the device of the weight called `name`: here a number that is repeated.
    repeated = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
    setattr(layer.get_base_layer(), name, nn.Parameter(repeated, requires_grad=False))
    return weight.read() + layer.get_delta_weight("default").detach()


# ---------------------------------------------------------------------------
# Writing


def convert_checkpoint(
    source: Path | str,
    folder: Path,
    *,
    form: Format = "ours",
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    **settings: Any,
) -> ConversionReport:
    """Writes a checkpoint in another format; holds one tensor, or one expert, in memory at a time.

    Quantized weights are dequantized, and adapters are merged into the weights of their base model.

    Args:
        source: A folder of T5, Switch, T5X, ours or a host, or a name of the hub.
        folder: Exists, and is empty.
        form: `ours`, which for a host is its own, or `switch` or `t5` for transformers' classes.
        dtype: Dtype of the floating-point weights; None for the source's.
        max_shard_size: Bytes of a file, see `save_pretrained`.
        settings: Fields of STMoEConfig that differ from the source's; `revision`, `token`,
            `cache_dir` and the like.

    Returns:
        How every tensor of the source was converted.

    Raises:
        ConfigError: When the model cannot be written as `form`; gives every reason.
        CheckpointError: When a tensor of the source is not accounted for.
    """
    check_choice("form", form, get_args(Format))
    expected = "a torch.dtype such as torch.bfloat16, or None"
    check(dtype is None or isinstance(dtype, torch.dtype), "dtype", dtype, expected)

    download = {name: value for name, value in settings.items() if name in DOWNLOAD}
    checkpoint = open_checkpoint(source, dequantize=True, **settings)
    write_checkpoint(
        checkpoint,
        source,
        folder,
        form=form,
        dtype=dtype,
        max_shard_size=max_shard_size,
        **download,
    )
    return checkpoint.report


def rewrite_checkpoint(
    source: Path | str,
    folder: Path,
    change: Callable[[ConvertedCheckpoint], ConvertedCheckpoint],
    **download: Any,
) -> Any:
    """Writes a changed model in our format; holds one tensor in memory at a time.

    Args:
        source: A folder of T5, Switch, T5X or ours, or a name of the hub.
        folder: Exists, and is empty.
        change: Returns the model to write; its weights are computed when they are read.
        download: `revision`, `token`, `cache_dir` and the like.

    Returns:
        The config of the changed model.

    Raises:
        CheckpointError: When a tensor of the source is not accounted for.
    """
    checkpoint = open_checkpoint(source, **download)
    checkpoint.report.refuse_unexplained()
    changed = change(checkpoint)
    write_checkpoint(changed, source, folder, **download)
    return changed.config


def write_checkpoint(
    checkpoint: ConvertedCheckpoint,
    source: Path | str,
    folder: Path,
    *,
    form: Format = "ours",
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    **download: Any,
) -> None:
    """Writes a checkpoint with the tokenizer and generation settings of its source.

    Args:
        checkpoint: The model; its weights are read one at a time.
        source: Where it comes from: a folder or a name of the hub.
        folder: See `convert_checkpoint` for this and the following.
        form: Likewise.
        dtype: Likewise.
        max_shard_size: Likewise.
        download: `revision`, `token`, `cache_dir` and the like.

    Raises:
        ConfigError: When the model cannot be written as `form`; gives every reason.
        CheckpointError: When a tensor of the source is not accounted for.
    """
    checkpoint.report.refuse_unexplained()
    config = checkpoint.config
    is_ours = isinstance(config, STMoEConfig)
    check(form == "ours" or is_ours, "The format of a host", form, "'ours', its own class")
    tokenizer_files: dict[str, Path] = {}
    if is_t5x(source):
        generation_config = GenerationConfig.from_model_config(config)
    else:
        tokenizer_files = find_tokenizer_files(source, download)
        generation_config = load_generation_config(source, download)

    # config.json, and the weights under the names of the format.
    dtype = dtype or _float_dtype(checkpoint.weights)
    config.dtype = str(dtype).removeprefix("torch.")
    if form == "ours":
        config.architectures = [type(empty_model(config)).__name__]
        config.save_pretrained(folder)
        weights = dict(checkpoint.weights)
    else:
        _write_hf_config(config, _FAMILY[form], folder)
        weights = _hf_weights(checkpoint, _FAMILY[form])

    for name in weights:
        weights[name] = _cast(weights[name], dtype)
    write_weights(folder, weights, max_shard_size, source=source)
    write_weight_sums(folder)
    generation_config.save_pretrained(folder)
    for name, path in tokenizer_files.items():
        shutil.copyfile(path, folder / name)

    # AutoTokenizer reads spiece.model by the class of the model, and knows none for ours.
    names = tokenizer_files.keys()
    if form == "ours" and is_ours and SENTENCEPIECE_FILE in names and TOKENIZER_FILE not in names:
        load_tokenizer(folder).save_pretrained(str(folder))


def find_tokenizer_files(source: Path | str, download: Mapping[str, Any]) -> dict[str, Path]:
    """Returns the files of a model's tokenizer and processor by name.

    Args:
        source: A folder or a name of the hub.
        download: `revision`, `token`, `cache_dir` and the like.

    Raises:
        CheckpointError: When a JSON file is torn, or holds no object.
    """
    files: dict[str, Path] = {}
    for name in TOKENIZER_FILES:
        path = find_file(source, name, **download)
        if path is None:
            continue
        if name.endswith(".json"):
            read_json_object(path)
        files[name] = path
    return files


def find_tokenizer(source: Path | str) -> Path:
    """Returns the folder of a model's tokenizer; for the hub's, that of the files on this machine."""
    files = find_tokenizer_files(source, {}).values()
    return next((path.parent for path in files), Path(source))


def _float_dtype(weights: Mapping[str, LazyTensor]) -> torch.dtype:
    """Returns the dtype of the first floating-point weight."""
    for weight in weights.values():
        if weight.is_floating_point():
            return weight.dtype
    raise AssertionError("a model has floating-point weights")


def _cast(weight: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    """Returns a weight <any>[...] that is read as `dtype` if it is floating-point."""
    if not weight.is_floating_point():
        return weight

    def read() -> Tensor:
        return weight.read().to(dtype)

    def read_each() -> Iterator[Tensor]:
        return (expert.to(dtype) for expert in weight)

    return LazyTensor(weight.shape, dtype, read, read_each=read_each)


def write_weights(
    folder: Path,
    weights: Mapping[str, LazyTensor],
    max_shard_size: int | str,
    *,
    source: Path | str,
) -> None:
    """Writes weights as `save_pretrained` does, reading them one after the other, and expert by expert.

    Args:
        folder: Target folder.
        weights: <any>[...] by name.
        max_shard_size: Bytes of a file.
        source: Folder or hub name of the weights, for messages.

    Raises:
        CheckpointError: When a weight of `source` holds NaN or infinity, or does in the requested
            dtype.
    """
    empty = {name: weight.empty() for name, weight in weights.items()}
    places = begin_weights(folder, empty, max_shard_size)
    for name, weight in tqdm(weights.items(), desc="Converting", unit="tensor"):
        path, start = places[name]
        for tensor in weight if len(weight.shape) == 3 else [weight.read()]:
            check_finite(name, tensor, source)
            write_tensor(tensor, (path, start))
            start += tensor.nbytes
        size = start - places[name][1]
        assert size == weight.empty().nbytes, (
            f"{name} has {size} bytes, not those of {weight.shape}"
        )


# ---------------------------------------------------------------------------
# transformers' T5 and Switch


def _write_hf_config(config: STMoEConfig, family: Family, folder: Path) -> None:
    """Writes the config.json of a T5 or Switch."""
    fields = {**to_hf_config(config, family), "dtype": config.dtype}
    text = json.dumps(fields, indent=2, sort_keys=True)
    (folder / "config.json").write_text(f"{text}\n", encoding="utf-8")


def _hf_weights(checkpoint: ConvertedCheckpoint, family: Family) -> dict[str, LazyTensor]:
    """Returns the tensors <any>[...] of a T5 or Switch by name."""
    config = checkpoint.config
    splits = {mapping.name: mapping.split for mapping in hf_weight_map(config, family)}
    weights = split_weights(checkpoint.weights, splits)

    # A Switch with its own head has a table for each stack.
    if family == "switch_transformers" and not config.tie_word_embeddings:
        for stack in ("encoder", "decoder"):
            weights[f"{stack}.embed_tokens.weight"] = weights["shared.weight"]
    return weights


Split = Callable[[Tensor], dict[str, Tensor]]
"""Returns the parts <any>[...], by name, in which a weight <any>[...] or that of an expert is stored."""


def split_weights(
    weights: Mapping[str, LazyTensor], splits: Mapping[str, Split]
) -> dict[str, LazyTensor]:
    """Returns the parts <any>[...] of our weights by name, which are read once, and in this order.

    Args:
        weights: <any>[...] by name.
        splits: The parts of each, in the order of the result.
    """
    parts: dict[str, LazyTensor] = {}
    for weight_name, split in splits.items():
        weight = weights[weight_name]
        unread: dict[str, Tensor] = {}
        for name, part in split(weight.empty()).items():
            read = partial(_read_part, weight, split, unread, name)
            read_each = partial(_read_each_part, weight, split, unread, name)
            parts[name] = LazyTensor(part.shape, part.dtype, read, read_each=read_each)
    return parts


def _read_part(weight: LazyTensor, split: Split, unread: dict[str, Tensor], name: str) -> Tensor:
    """Returns the part <any>[...] called `name` of our weight; keeps the others until they are read, too."""
    if name not in unread:
        unread.update(split(weight.read()))
    return unread.pop(name)


def _read_each_part(
    weight: LazyTensor, split: Split, unread: dict[str, Tensor], name: str
) -> Iterator[Tensor]:
    """Yields an expert's part <any>[...] called `name`, one after the other; see `_read_part`."""
    if name in unread:
        yield from unread.pop(name)
        return
    for number, expert in enumerate(weight):
        for part_name, part in split(expert).items():
            if part_name == name:
                yield part
                continue
            if part_name not in unread:
                unread[part_name] = part.new_empty((weight.shape[0], *part.shape))
            unread[part_name][number] = part
