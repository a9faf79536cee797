"""One checkpoint to another format, once and for all: transformers' T5 and Switch, T5X and ours,
tensor by tensor.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig
from transformers.utils.hub import cached_file

from moe.checkpoint.sharded_weights import begin_files, plan_files, stored_tensors, write_tensor
from moe.checks import check, check_choice
from moe.convert.hf_config import Family, family_of, their_fields
from moe.convert.hf_names import Weight, transformers_names
from moe.convert.hf_weights import ConversionReport, Foreign, convert_weights, open_transformers
from moe.convert.t5x import is_t5x, open_t5x
from moe.errors import CheckpointError
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.pretrained import DOWNLOAD, load_generation_config
from moe.models.weight_checksums import write_weight_sums
from moe.models.weight_files import (
    COPY_AGAIN,
    LazyTensor,
    check_finite,
    find_weight_files,
    open_weights,
)
from moe.parsing import read_json, to_record

Format = Literal["ours", "switch", "t5"]
_FAMILY: Mapping[Format, Family] = {"switch": "switch_transformers", "t5": "t5"}
_TOKENIZER_FILES = (
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "spiece.model",
    "tokenizer.model",
)


def conversion_report(source: Path | str, **settings: Any) -> ConversionReport:
    """Returns what becomes of every tensor of a T5, Switch or T5X checkpoint as a model of ours;
    converts nothing.

    Args:
        source: A folder, or a name of the hub.
        settings: Fields of STMoEConfig that differ, and `revision`, `token`, `cache_dir` and the
            like.

    Raises:
        ConfigError: When it is of a model that this library cannot represent.
        CheckpointError: When there are no weights, or they are torn.
    """
    return open_checkpoint(source, **settings).report


def open_checkpoint(source: Path | str, **settings: Any) -> Foreign:
    """Returns any checkpoint that this library reads, ours too, as weights of ours; see
    `conversion_report`.
    """
    if str(source).startswith(("/", ".", "~")) and not Path(source).exists():
        raise CheckpointError(
            f"There is no folder {source}. Give one with a checkpoint, or a name of the hub."
        )
    if is_t5x(source):
        return open_t5x(source, **settings)
    download = {name: settings.pop(name) for name in DOWNLOAD if name in settings}
    try:
        config = STMoEConfig.from_pretrained(source, **download)
    except OSError as error:
        if error.errno is not None:
            raise
        raise CheckpointError(str(error)) from error
    config = config.replaced(**settings)
    if family_of(STMoEConfig.read_raw(source, **download)):
        return open_transformers(source, config, **download)
    stored = open_weights(find_weight_files(source, **download))
    with torch.device("meta"):
        names = stored_tensors(STMoEForConditionalGeneration(config))
    return convert_weights(
        str(source), config, [Weight(name, (name,)) for name in names], stored, ignored={}
    )


def convert_checkpoint(
    source: Path | str,
    folder: Path,
    *,
    form: Format = "ours",
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    **settings: Any,
) -> ConversionReport:
    """Writes a checkpoint in another format; holds one tensor in memory at a time.

    Args:
        source: A folder of T5, Switch, T5X or ours, or a name of the hub.
        folder: Exists, and is empty.
        form: `ours`, or what transformers' own `switch` or `t5` classes load.
        dtype: Of the floating-point weights; None for the source's.
        max_shard_size: Bytes of a file, see `save_pretrained`.
        settings: Fields of STMoEConfig that differ from the source's; `revision`, `token`,
            `cache_dir` and the like.

    Returns:
        What became of every tensor of the source.

    Raises:
        ConfigError: When the model cannot be written as `form`; gives every reason.
        CheckpointError: When a tensor of the source is not accounted for.
    """
    check_choice("form", form, get_args(Format))
    check(
        dtype is None or isinstance(dtype, torch.dtype),
        "dtype",
        dtype,
        "a torch.dtype such as torch.bfloat16, or None",
    )
    download = {name: value for name, value in settings.items() if name in DOWNLOAD}
    config, weights, report = open_checkpoint(source, **settings)
    report.refuse_unexplained()
    tokenizer_files = {} if is_t5x(source) else _find_tokenizer_files(source, download)
    generation = GenerationConfig.from_model_config(config)
    if not is_t5x(source):
        generation = load_generation_config(source, download)
    dtype = dtype or next(weight.dtype for weight in weights.values() if weight.is_floating_point())
    config.dtype = str(dtype).removeprefix("torch.")
    if form == "ours":
        config.architectures = [STMoEForConditionalGeneration.__name__]
        config.save_pretrained(folder)
    else:
        fields = {**their_fields(config, _FAMILY[form]), "dtype": config.dtype}
        (folder / "config.json").write_text(
            json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
        weights = _split(weights, transformers_names(config, _FAMILY[form]))
        if (
            form == "switch" and not config.tie_word_embeddings
        ):  # its class then has a table for each stack
            weights |= {
                f"{stack}.embed_tokens.weight": weights["shared.weight"]
                for stack in ("encoder", "decoder")
            }
    cast = {name: _cast(weight, dtype) for name, weight in weights.items()}
    write_weights(folder, cast, max_shard_size, source=source)
    write_weight_sums(folder)
    generation.save_pretrained(folder)
    for name, path in tokenizer_files.items():
        shutil.copyfile(path, folder / name)
    return report


def _find_tokenizer_files(source: Path | str, download: Mapping[str, Any]) -> dict[str, Path]:
    """Returns the files of a model's tokenizer by name.

    Raises:
        CheckpointError: When one of JSON is torn, or holds no object.
    """
    found = {}
    for name in _TOKENIZER_FILES:
        path = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **download)
        if path is None:
            continue
        if name.endswith(".json"):
            content = read_json(Path(path), advice=COPY_AGAIN, error=CheckpointError, nan=True)
            to_record(
                dict[str, Any], content, where=str(path), advice=COPY_AGAIN, error=CheckpointError
            )
        found[name] = Path(path)
    return found


def write_weights(
    folder: Path,
    weights: Mapping[str, LazyTensor],
    max_shard_size: int | str,
    *,
    source: Path | str,
) -> None:
    """Writes weights as `save_pretrained` does, reading them one after the other.

    Raises:
        CheckpointError: When a weight of `source` holds NaN or infinity, or does so as the dtype
            that was asked for.
    """
    files, index = plan_files(
        {name: weight.empty() for name, weight in weights.items()}, max_shard_size
    )
    begin_files(folder, files, index)
    places = {
        name: (folder / file.name, start) for file in files for name, start in file.starts.items()
    }
    for name, weight in tqdm(weights.items(), desc="Converting", unit="tensor"):
        tensor = weight.read()
        check_finite(name, tensor, source)
        path, start = places[name]
        write_tensor(path, tensor, start)


def _cast(weight: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    """Returns a weight <any>[...] that is read as `dtype` if it is of floating point."""
    return (
        LazyTensor(weight.shape, dtype, lambda: weight.read().to(dtype))
        if weight.is_floating_point()
        else weight
    )


class _LastSplit:
    """Keeps the parts of the weight that was split last: parts are asked for weight by weight."""

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}

    def read(self, weight: Weight, whole: LazyTensor, name: str) -> Tensor:
        """Returns their tensor <any>[...] called `name`, a part of our weight."""
        if name not in self._parts:
            self._parts = {}
            self._parts = weight.split(whole.read())
        return self._parts[name]


def _split(weights: Mapping[str, LazyTensor], table: Iterable[Weight]) -> dict[str, LazyTensor]:
    """Returns their tensors by name, weight by weight in the order of the table."""
    last, parts = _LastSplit(), {}
    for weight in table:
        whole = weights[weight.name]
        for name, part in weight.split(whole.empty()).items():
            parts[name] = LazyTensor(
                part.shape, whole.dtype, partial(last.read, weight, whole, name)
            )
    return parts
