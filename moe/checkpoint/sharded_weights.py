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
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

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
from moe.models.card import model_card, write_card
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.weight_files import DTYPES, remove_replaced_weights, write_weight_sums

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class WeightsFile(NamedTuple):
    """The layout of a safetensors file.

    Attributes:
        name: Name of the file.
        header: Its first bytes.
        starts: First byte of each tensor, by name.
        size: Bytes of the whole file.
    """

    name: str
    header: bytes
    starts: dict[str, int]
    size: int


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


def whole_slices(shape: Sequence[int]) -> ShardSlices:
    """Returns the slices that are a whole tensor of this shape."""
    return tuple((0, size) for size in shape)


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

    No rank holds more than its shards and a copy of one. A failure on one rank is raised on all.

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
    tensors = stored_tensors(model)
    whole = whole_tensors(tensors, layouts)
    parameters = {name for name, _ in model.named_parameters()}
    files, index = plan_files(whole, max_shard_size, parameters=parameters)

    def write_headers() -> None:
        _write_config(model, folder, sections)
        begin_files(folder, files, index)

    def write_own_parts() -> None:
        for file in files:
            _write_parts(folder / file.name, file, tensors, layouts, mesh)

    # Files of their full size, which all ranks fill; checksums once all of them have.
    broadcast_from_rank_zero(write_headers)
    gather_or_raise(write_own_parts)
    digests = gather_sha256(folder, [file.name for file in files])
    broadcast_from_rank_zero(lambda: write_weight_sums(folder, digests))


def plan_files(
    whole: Mapping[str, Tensor],
    max_shard_size: int | str,
    *,
    parameters: Container[str] | None = None,
) -> tuple[list[WeightsFile], str | None]:
    """Returns the layouts of the files of `save_pretrained`, and the text of their index.

    The index is None for a single file.

    Args:
        whole: Tensors <any>[...] by name; they need no memory.
        max_shard_size: Bytes of a file.
        parameters: Names of the tensors that are parameters, not buffers; None for all of them.
    """
    split = split_torch_state_dict_into_shards(
        dict(whole), filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    files = []
    for file, names in split.filename_to_tensors.items():
        files.append(plan_file(file, {name: whole[name] for name in names}))
    # A single file needs no index.
    if not split.is_sharded:
        return files, None

    num_parameters = 0
    for name, tensor in whole.items():
        if parameters is None or name in parameters:
            num_parameters += tensor.numel()
    metadata = {"total_parameters": num_parameters, **split.metadata}
    index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
    return files, json.dumps(index, indent=2, sort_keys=True) + "\n"


def begin_files(folder: Path, files: Iterable[WeightsFile], index: str | None) -> None:
    """Writes the headers of files and their index, and reserves space for the tensors.

    Weights of an earlier save are removed.

    Args:
        folder: Folder of the model.
        files: Layouts of the files.
        index: Text of the index; None for a single file.
    """
    files = list(files)
    written = {file.name for file in files}
    if index is not None:
        written.add(SAFE_WEIGHTS_INDEX_NAME)
    remove_replaced_weights(folder, written)

    # A file that ends in a hole uses no disk space before it is filled.
    for file in files:
        with (folder / file.name).open("wb") as stream:
            stream.write(file.header)
            stream.truncate(file.size)
    if index is not None:
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(index, encoding="utf-8")


def write_tensor(path: Path, tensor: Tensor, position: int) -> None:
    """Writes the numbers of a tensor <any>[...] at a position of a file."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        _write_at(descriptor, _bytes_of(tensor), position)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of <any>[...], row by row."""
    return memoryview(cast(Any, tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()))


def plan_file(name: str, tensors: Mapping[str, Tensor]) -> WeightsFile:
    """Returns the layout of a safetensors file, identical to that of the safetensors library.

    Args:
        name: Name of the file.
        tensors: Its tensors <any>[...] by name; they need no memory.
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
    return WeightsFile(name, header, starts, len(header) + end)


def _write_parts(
    path: Path,
    file: WeightsFile,
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    mesh: Mesh | None,
) -> None:
    """Writes this rank's part of every tensor of a file.

    The first rank with a part writes it; rank zero writes what all ranks hold.
    """
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for name, start in file.starts.items():
            local = local_shard(tensors[name].detach())
            layout = layouts.get(name)

            # All ranks write parameters on a mesh, rank zero anything else.
            if layout is not None and mesh is not None:
                coordinate = MeshCoordinate.of(mesh)
                if not is_first_replica(layout, mesh, coordinate):
                    continue
                shape = layout.shape
                slices = shard_slices(layout, mesh.config, coordinate)
            elif is_rank_zero():
                shape = local.shape
                slices = whole_slices(shape)
            else:
                continue

            _write_slices(descriptor, name, local, slices, shape, start)
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def _write_slices(
    descriptor: int, name: str, local: Tensor, slices: ShardSlices, shape: Sequence[int], start: int
) -> None:
    """Writes a part of a tensor, run by run, into a file that holds the whole one.

    Args:
        descriptor: The file.
        name: Name of the tensor.
        local: <any>[...] the part.
        slices: Its position in the whole tensor.
        shape: Shape of the whole tensor.
        start: First byte of the whole tensor in the file.
    """
    sizes = [end - start for start, end in slices]
    assert local.numel() == math.prod(sizes), (
        f"{name}: {tuple(local.shape)} here, but {sizes} by its layout"
    )

    # The elements of a run are contiguous in the part and in the file.
    data = _bytes_of(local)
    done = 0
    for offset, length in contiguous_runs(slices, shape):
        num_bytes = length * local.itemsize
        position = start + offset * local.itemsize
        _write_at(descriptor, data[done : done + num_bytes], position)
        done += num_bytes


def _write_at(descriptor: int, data: memoryview, position: int) -> None:
    """Writes all of `data` at a position of a file.

    Memory mapping is not used: with it, a full disk kills the process.
    """
    while data:
        written = os.pwrite(descriptor, data, position)
        data = data[written:]
        position += written


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

    # Hosts of sparse layers have no card.
    if isinstance(model, STMoEForConditionalGeneration):
        card = model_card(model.config, base_model=model.source_model, sections=sections)
        write_card(folder, card)
