"""Writes a model on a mesh as `save_pretrained` does, by all ranks at once.

The files are laid out and their headers written first; then every rank writes its own part of each
tensor at its position.

torch's HuggingFaceStorageWriter does not replace this (tried with torch 2.13 on two ranks of `tp`):
where tensor parallelism shards F it writes gate and up as [E, 2, F, D], which `from_pretrained` does
not read, and it writes every byte twice, in a file of each rank and in the consolidated one.
"""

import json
import math
import os
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from moe.distributed.collectives import broadcast_from_rank_zero, gather_or_raise, is_rank_zero
from moe.distributed.mesh import Mesh
from moe.distributed.sharding import (
    Layout,
    MeshCoordinate,
    ShardSlices,
    contiguous_runs,
    is_first_replica,
    local_shard,
    shard_slices,
)
from moe.distributed.verification import gather_sha256
from moe.models.adapter_files import is_adapter, stored_name
from moe.models.card import model_card, write_card
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.weight_files import DTYPES, remove_replaced_weights, stored_state, write_weight_sums

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

TensorPlace = tuple[Path, int]
"""File of a tensor, and the position of its first byte."""


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and persistent buffers <any>[...] of this rank by name.

    Tied ones appear once, under their first name. FSDP frees what it has gathered, so that each
    parameter is again the shard that the optimizer holds.
    """
    state = model.state_dict()
    first_names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return {name: tensor for name, tensor in state.items() if name in first_names}


def whole_tensors(
    tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout]
) -> dict[str, Tensor]:
    """Returns tensors <any>[...] without memory, with their shapes in a single process.

    Args:
        tensors: Result of `stored_tensors`, <any>[...].
        layouts: Layout of each parameter.
    """
    whole = {}
    for name, tensor in tensors.items():
        shape = list(tensor.shape)
        layout = layouts.get(name)

        # Gate and up projection share a dimension again.
        if layout is not None and layout.packed and tensor.shape == layout.shape:
            shape[-3:-1] = [shape[-3] * shape[-2]]
        whole[name] = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return whole


def write_model(
    model: STMoEForConditionalGeneration,
    layouts: Mapping[str, Layout],
    folder: Path,
    mesh: Mesh | None = None,
    *,
    max_shard_size: int | str = "50GB",
    sections: Mapping[str, str] | None = None,
) -> None:
    """Writes what `save_pretrained` would, byte for byte; every rank must call it.

    Of a model with adapters these are the adapters, its config and its card. No rank holds more than
    its shards and a copy of one. A failure on one rank is raised on all.

    Args:
        model: Whole, or sharded by `shard_model`.
        layouts: Layout of each parameter.
        folder: An existing folder on a file system shared by all ranks, which write into the same
            files.
        mesh: Mesh over which the model is sharded; None for one process.
        max_shard_size: Bytes of a file, see `save_pretrained`.
        sections: Sections of the model card, see `model_card`.

    Raises:
        OSError: When the disk is full or fails.
    """
    tensors = stored_state(stored_tensors(model))
    adapters = {stored_name(name): x for name, x in tensors.items() if is_adapter(name)}
    stem = "adapter_model" if adapters else "model"
    tensors = adapters or tensors
    layouts = {stored_name(name): layout for name, layout in layouts.items()}

    def begin() -> dict[str, TensorPlace]:
        _write_config(model, folder, sections)
        buffers = tensors.keys() - {name for name, _ in model.named_parameters()}
        return begin_weights(
            folder, whole_tensors(tensors, layouts), max_shard_size, buffers=buffers, stem=stem
        )

    # Files of their full size, which all ranks fill; checksums once all of them have.
    places = broadcast_from_rank_zero(begin)
    gather_or_raise(lambda: _write_parts(places, tensors, layouts, mesh))
    digests = gather_sha256(folder, {path.name for path, _ in places.values()})
    broadcast_from_rank_zero(lambda: write_weight_sums(folder, digests))


def begin_weights(
    folder: Path,
    tensors: Mapping[str, Tensor],
    max_shard_size: int | str,
    *,
    buffers: Container[str] = (),
    stem: str = "model",
) -> dict[str, TensorPlace]:
    """Writes the headers and the index of `save_pretrained`'s files, and reserves space for the tensors.

    Weights of an earlier save are removed.

    Args:
        folder: Folder of the model.
        tensors: <any>[...] by name; they need no memory.
        max_shard_size: Bytes of a file.
        buffers: Names of the tensors that are not parameters.
        stem: Name of a single file, before `.safetensors`.

    Returns:
        Where each tensor belongs, by name; see `write_tensor`.
    """
    split = split_torch_state_dict_into_shards(
        dict(tensors), filename_pattern=stem + "{suffix}.safetensors", max_shard_size=max_shard_size
    )
    index = [SAFE_WEIGHTS_INDEX_NAME] if split.is_sharded else []
    remove_replaced_weights(folder, [*split.filename_to_tensors, *index])

    # A file that ends in a hole uses no disk space before it is filled.
    places: dict[str, TensorPlace] = {}
    for file, names in split.filename_to_tensors.items():
        header, starts, size = _plan_file({name: tensors[name] for name in names})
        with (folder / file).open("wb") as stream:
            stream.write(header)
            stream.truncate(size)
        for name, start in starts.items():
            places[name] = (folder / file, start)

    # A single file needs no index.
    if split.is_sharded:
        num_parameters = 0
        for name, tensor in tensors.items():
            if name not in buffers:
                num_parameters += tensor.numel()
        metadata = {"total_parameters": num_parameters, **split.metadata}
        content = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")
    return places


def _plan_file(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int], int]:
    """Returns the layout of a safetensors file, identical to that of the safetensors library.

    Args:
        tensors: Its tensors <any>[...] by name; they need no memory.

    Returns:
        Its first bytes, the first byte of each tensor by name, and the bytes of the whole file.
    """
    dtype_order = list(_NAMES)

    def position(key: str) -> tuple[int, str]:
        return dtype_order.index(tensors[key].dtype), key

    # Offsets count from the end of the header.
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for key in sorted(tensors, key=position):
        tensor = tensors[key]
        offsets[key] = end
        end += tensor.nbytes
        entries[key] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[key], end],
        }

    # The header: its length in 8 bytes, and JSON padded to a multiple of 8.
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    starts = {key: len(header) + offset for key, offset in offsets.items()}
    return header, starts, len(header) + end


def _write_parts(
    places: Mapping[str, TensorPlace],
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    mesh: Mesh | None,
) -> None:
    """Writes this rank's part of every tensor, and waits until it is on the disk.

    The first rank with a part writes it; rank zero writes what all ranks hold.
    """
    for name, place in places.items():
        part = local_shard(tensors[name].detach())
        layout = layouts.get(name)
        if layout is not None and mesh is not None:
            coordinate = MeshCoordinate.of(mesh)
            if is_first_replica(layout, mesh, coordinate):
                slices = shard_slices(layout, mesh.config, coordinate)
                write_tensor(part, place, slices, layout.shape)
        elif is_rank_zero():
            write_tensor(part, place)

    for path in {path for path, _ in places.values()}:
        flush_to_disk(path)


def write_tensor(
    x: Tensor,
    place: TensorPlace,
    slices: ShardSlices | None = None,
    shape: Sequence[int] | None = None,
) -> None:
    """Writes a tensor, or a part of one, into a file that holds the whole one.

    Memory mapping is not used: with it, a full disk kills the process.

    Args:
        x: <any>[...] the tensor or the part.
        place: Where the whole tensor belongs, see `begin_weights`.
        slices: Position of the part in the whole tensor; None for all of it.
        shape: Shape of the whole tensor; None for that of `x`.

    Raises:
        OSError: When the disk is full or fails; names the file.
    """
    shape = x.shape if shape is None else shape
    slices = tuple((0, size) for size in shape) if slices is None else slices
    assert x.numel() == math.prod(end - start for start, end in slices), (x.shape, slices)

    path, start = place
    data = memoryview(cast(Any, x.cpu().contiguous().flatten().view(torch.uint8).numpy()))
    descriptor = os.open(path, os.O_WRONLY)
    try:
        # The elements of a run are contiguous in the part and in the file.
        for offset, length in contiguous_runs(slices, shape):
            position = start + offset * x.itemsize
            end = position + length * x.itemsize
            while position < end:
                written = os.pwrite(descriptor, data[: end - position], position)
                data = data[written:]
                position += written
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def flush_to_disk(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_config(
    model: STMoEForConditionalGeneration, folder: Path, sections: Mapping[str, str] | None
) -> None:
    """Writes config.json, generation_config.json and the model card as `save_pretrained` does."""
    # Same as `save_pretrained`: the dtype of the weights, and the model's class.
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    adapters = getattr(model, "peft_config", {}).get("default")
    if adapters is not None:
        adapters.save_pretrained(folder)

    # Hosts of sparse layers have no card.
    if isinstance(model, STMoEForConditionalGeneration):
        card = model_card(
            model.config, base_model=model.source_model, sections=sections, adapters=adapters
        )
        write_card(folder, card)
