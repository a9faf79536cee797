"""A model on a mesh to the files of `save_pretrained`: every rank writes its own part of each
tensor into its place.
"""

import json
import math
import os
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from moe.distributed.collectives import broadcast_from_rank_zero, gather_or_raise, is_rank_zero
from moe.distributed.mesh import Mesh
from moe.distributed.shard_slices import contiguous_runs, is_first_replica, shard_slices
from moe.distributed.sharding import Layout, MeshCoordinate, local_shard
from moe.distributed.verification import gather_sha256
from moe.models.card import model_card, write_card
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.weight_checksums import write_weight_sums
from moe.models.weight_files import DTYPES, remove_replaced_weights

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class WeightsFile(NamedTuple):
    """What a safetensors file looks like before there is a number in it.

    Attributes:
        name: Of the file.
        header: Its first bytes.
        starts: Byte at which each tensor starts, by name.
        size: Of the whole file in bytes.
    """

    name: str
    header: bytes
    starts: dict[str, int]
    size: int


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns every parameter and persistent buffer by name, as it lies on this rank; tied ones
    once, by their first.

    FSDP lets go of what it has gathered, so that each is the shard that the optimizer knows.
    """
    state = model.state_dict()
    first_names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return {name: tensor for name, tensor in state.items() if name in first_names}


def whole_tensors(config: object, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a tensor without memory for each of `tensors`, of the shape that it has in one
    process.
    """
    with torch.device("meta"):
        whole = STMoEForConditionalGeneration(config).state_dict()  # pyright: ignore[reportArgumentType]
    return {
        name: torch.empty_like(whole[name], dtype=tensor.dtype) for name, tensor in tensors.items()
    }


def write_model(
    model: STMoEForConditionalGeneration,
    layouts: Mapping[str, Layout],
    folder: Path,
    mesh: Mesh | None = None,
    *,
    max_shard_size: int | str = "50GB",
) -> None:
    """Writes what `save_pretrained` would, byte for byte; no rank holds more than its shards and a
    copy of one.

    Every rank must call it, and `folder` must be one file system that all ranks see: they write
    into the same files. A failure on one rank is raised on all.

    Args:
        model: Whole, or cut by `shard_model`.
        layouts: Where each parameter lies.
        folder: Exists.
        mesh: What the model is cut over; None for one process.
        max_shard_size: Bytes of a file, see `save_pretrained`.

    Raises:
        OSError: When the disk is full or fails.
    """
    tensors = stored_tensors(model)
    whole = whole_tensors(model.config, tensors)
    files, index = plan_files(
        whole, max_shard_size, parameters={name for name, _ in model.named_parameters()}
    )

    def begin() -> None:
        _write_config(model, folder)
        begin_files(folder, files, index)

    broadcast_from_rank_zero(begin)
    gather_or_raise(
        lambda: [_write_parts(folder / file.name, file, tensors, layouts, mesh) for file in files]
    )
    digests = gather_sha256(folder, [file.name for file in files])
    broadcast_from_rank_zero(lambda: write_weight_sums(folder, digests))


def plan_files(
    whole: Mapping[str, Tensor],
    max_shard_size: int | str,
    *,
    parameters: Container[str] | None = None,
) -> tuple[list[WeightsFile], str | None]:
    """Returns the files of `save_pretrained` for tensors, and the text of their index when there
    are several.

    Args:
        whole: Tensors by name; they need no memory.
        max_shard_size: Bytes of a file.
        parameters: Names of those that are no buffers; None for all.
    """
    split = split_torch_state_dict_into_shards(
        dict(whole), filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    files = [
        plan_file(file, {name: whole[name] for name in names})
        for file, names in split.filename_to_tensors.items()
    ]
    if not split.is_sharded:
        return files, None
    numbers = sum(
        tensor.numel() for name, tensor in whole.items() if parameters is None or name in parameters
    )
    metadata = {"total_parameters": numbers, **split.metadata}
    index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
    return files, json.dumps(index, indent=2, sort_keys=True) + "\n"


def begin_files(folder: Path, files: Iterable[WeightsFile], index: str | None) -> None:
    """Writes the headers of files and their index, and makes room for the numbers; removes an
    earlier save's files.
    """
    files = list(files)
    remove_replaced_weights(
        folder, {*(file.name for file in files), *([SAFE_WEIGHTS_INDEX_NAME] if index else [])}
    )
    for file in files:
        with (folder / file.name).open("wb") as stream:
            stream.write(file.header)
            stream.truncate(file.size)
    if index is not None:
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(index, encoding="utf-8")


def write_tensor(path: Path, tensor: Tensor, position: int) -> None:
    """Writes the numbers of <any>[...] at a position of a file."""
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
    """Returns the layout of a safetensors file that holds `tensors`, as the library safetensors
    lays them out.
    """
    order = list(_NAMES)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for key, tensor in sorted(
        tensors.items(), key=lambda item: (order.index(item[1].dtype), item[0])
    ):
        starts[key], end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        entries[key] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": shape,
            "data_offsets": [starts[key], end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return WeightsFile(
        name, header, {key: len(header) + start for key, start in starts.items()}, len(header) + end
    )


def _write_parts(
    path: Path,
    file: WeightsFile,
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    mesh: Mesh | None,
) -> None:
    """Writes this rank's part of every tensor of a file that it is the first to hold; what all
    hold, rank 0 writes.
    """
    place = MeshCoordinate.of(mesh) if mesh else None
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for name, start in file.starts.items():
            local = local_shard(tensors[name].detach())
            if name in layouts and mesh is not None and place is not None:
                if not is_first_replica(layouts[name], mesh, place):
                    continue
                shape, box = layouts[name].shape, shard_slices(layouts[name], mesh.config, place)
            elif is_rank_zero():
                shape, box = local.shape, tuple((0, size) for size in local.shape)
            else:
                continue
            sizes = [end - start for start, end in box]
            assert local.numel() == math.prod(sizes), (
                f"{name}: {tuple(local.shape)} here, but {sizes} by its layout"
            )
            data = _bytes_of(local)
            done = 0
            for offset, length in contiguous_runs(box, shape):
                num_bytes = length * local.itemsize
                _write_at(
                    descriptor, data[done : done + num_bytes], start + offset * local.itemsize
                )
                done += num_bytes
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def _write_at(descriptor: int, data: memoryview, position: int) -> None:
    """Writes all of `data` at a position of a file; not through mapped memory, where a full disk
    kills the process.
    """
    while data:
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written


def _write_config(model: STMoEForConditionalGeneration, folder: Path) -> None:
    """Writes config.json, generation_config.json and the model card as `save_pretrained` does."""
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [STMoEForConditionalGeneration.__name__]
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    write_card(folder, model_card(model.config, base_model=model.source_model))
