"""Reads the index and the shards of a checkpoint without running any code in them.

torch.distributed.checkpoint stores the index as a pickle, which could call any function. Here it may
only name the classes of an index, and its content is checked before it is used.
"""

import pickle
import warnings
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from moe.checkpoint.integrity import INDEX_FILE
from moe.errors import CheckpointError

# Names in the index of a real checkpoint. BytesStorageMetadata is deliberately omitted: torch would
# unpickle such entries.
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
    """A pickle contains a name that is not part of any index."""


class _IndexUnpickler(pickle._Unpickler):
    """Reads the index of a checkpoint; rejects any other name before importing it.

    It uses the Python implementation: for a damaged position of a value, the one in C allocates so
    much memory that the system kills the process.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Returns a class that is part of an index.

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
    """torch's reader of checkpoints, with a safe index."""

    index_error: CheckpointError | None = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Returns the index; stores the error, which torch 2.11 loses."""
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
        CheckpointError: When there is none, it is damaged, or it contains names that are not part of
            an index, as a file made to run code does.
    """
    file = path / INDEX_FILE
    try:
        with file.open("rb") as stream:
            index: Metadata = _IndexUnpickler(stream).load()

        # Tensors have shapes, and each piece of a tensor is in a file of this checkpoint.
        for name, entry in index.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"{name} is not a tensor")
            _require_counts(name, entry.size)
        for location in index.storage_data.values():
            name = location.relative_path
            if name != PurePath(name).name or location.transform_descriptors:
                raise ValueError(f"a shard is {name}, which is not a plain file of the checkpoint")
            _require_counts(name, (location.offset, location.length))
    except _ForbiddenNameError as error:
        raise CheckpointError(
            f"{file} names {error}, which never occurs in the index of a checkpoint: the file may have been made to "
            "run code. Nothing was executed. Do not use this checkpoint unless you know who wrote it; resume from "
            "another one."
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{path} has no index of its shards ({INDEX_FILE}: {type(error).__name__}: {error}): the checkpoint is "
            "incomplete. Resume from another checkpoint, or start a new run."
        ) from error
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


def _require_counts(name: str, numbers: Iterable[int]) -> None:
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{name} has the sizes {numbers}")
