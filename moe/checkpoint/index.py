"""The index and the shards of a checkpoint, read without running any code that is in them.

torch.distributed.checkpoint keeps the index as a pickle, which could call any function. Here it may
only name the classes that an index consists of, and its content is checked before it is used.
"""

import pickle
import warnings
from pathlib import Path, PurePath
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

from moe.checkpoint.integrity import INDEX_FILE
from moe.errors import CheckpointError
from moe.opening import open_to_read

# What the index of a real checkpoint names. BytesStorageMetadata is left out on purpose: torch
# unpickles such entries.
_METADATA = "torch.distributed.checkpoint.metadata"
_ADMITTED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
}
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}


class _ForbiddenNameError(Exception):
    """A pickle names something that no index consists of."""


class _IndexUnpickler(pickle._Unpickler):
    """Reads the index of a checkpoint, and refuses any other name before it is even imported.

    It is Python's own form of the class: that in C makes room for any number that a damaged byte
    gives as the position of a value, and the machine ends the process for the memory that it takes.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Returns a class that an index consists of.

        Raises:
            _ForbiddenNameError: For any other name.
        """
        if (module, name) in _ADMITTED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]

        # The folder in which the checkpoint was written.
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return PurePath
        raise _ForbiddenNameError(f"{module}.{name}")


class _Reader(FileSystemReader):
    """torch's reader of checkpoints, with an index that cannot run anything."""

    index_error: CheckpointError | None = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Returns the index; keeps the reason why it cannot, which torch 2.11 loses."""
        try:
            index = read_index(Path(self.path))
        except CheckpointError as error:
            self.index_error = error
            raise
        index.storage_meta = StorageMeta(load_id=self.load_id)
        return index


def read_index(path: Path) -> Metadata:
    """Returns the index of the checkpoint at `path`.

    Raises:
        CheckpointError: When there is none, it is damaged, or it names anything that no index
            consists of, as a file does that was made to run code.
    """
    file = path / INDEX_FILE
    try:
        with open(file, "rb", opener=open_to_read) as stream:
            index = _IndexUnpickler(stream).load()
    except _ForbiddenNameError as error:
        raise CheckpointError(
            f"{file} names {error}, which no index of a checkpoint does: it may have been made to run code, and "
            "nothing of it was run. Do not use this checkpoint unless you know who wrote it; go on from another one."
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{path} has no index of its shards ({INDEX_FILE}: {type(error).__name__}: {error}): it is torn. "
            "Resume from another checkpoint, or start a new run."
        ) from error

    reason = _find_anomaly(index)
    if reason:
        raise CheckpointError(
            f"{file} is damaged: {reason}. Go on from another checkpoint, or restore the file from a copy."
        )
    return index


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors of a checkpoint, by name.

    Raises:
        CheckpointError: See `read_index`.
    """
    entries = cast(dict[str, TensorStorageMetadata], read_index(path).state_dict_metadata)
    return {name: tuple(entry.size) for name, entry in entries.items()}


def read_into(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fills tensors <any>[...], whole or sharded, from a checkpoint, by name.

    Raises:
        CheckpointError: When a rank cannot read its parts.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        reader = _Reader(path)
        try:
            load(tensors, storage_reader=reader)
        except CheckpointException as failed:
            rank, error = cause_of(failed)
            raise CheckpointError(
                f"{path} could not be read: rank {rank} failed with {reader.index_error or error!r}."
            ) from failed


def cause_of(failed: CheckpointException) -> tuple[int, BaseException]:
    """Returns a rank that failed, and how: the first with an error of the disk, else the first."""
    ranks = sorted(failed.failures)
    for rank in ranks:
        error = failed.failures[rank][0]
        if isinstance(error, OSError):
            return rank, error
    return ranks[0], failed.failures[ranks[0]][0]


def _find_anomaly(index: Any) -> str:
    """Returns what in an index is not as torch writes it; an empty text when all is."""
    if not isinstance(index, Metadata):
        return f"it holds a {type(index).__name__}"
    entries = getattr(index, "state_dict_metadata", None)
    pieces = getattr(index, "storage_data", None)
    if not isinstance(entries, dict) or not isinstance(pieces, dict):
        return "it has no list of tensors"

    # Tensors: each has a shape, and so has each of its chunks.
    for name, entry in entries.items():
        if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
            return f"the entry {name!r} is no tensor"
        sizes = [getattr(entry, "size", None)]
        for chunk in getattr(entry, "chunks", None) or ():
            sizes += [getattr(chunk, "sizes", None), getattr(chunk, "offsets", None)]
        if not all(_is_shape(size) for size in sizes):
            return f"the tensor {name} has no shape"

    # Pieces: each lies in a file of the checkpoint, at a position, and as it is.
    for piece, location in pieces.items():
        file = getattr(location, "relative_path", None)
        is_file_name = isinstance(file, str) and file == PurePath(file).name
        if not isinstance(piece, MetadataIndex) or not is_file_name:
            return f"a shard is {file!r}, which is no file of the checkpoint"
        offset = getattr(location, "offset", None)
        length = getattr(location, "length", None)
        if not _is_shape((offset, length)):
            return f"a piece of {file} has no position in it"
        if getattr(location, "transform_descriptors", None):
            return f"a piece of {file} is encoded"
    return ""


def _is_shape(sizes: Any) -> bool:
    """Returns whether this is a tuple of integers that are not negative."""
    return isinstance(sizes, tuple) and all(type(size) is int and size >= 0 for size in sizes)
