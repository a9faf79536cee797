"""Reads the index and the shards of a checkpoint without running any code in them.

torch.distributed.checkpoint stores the index as a pickle, which could call any function. Here it may
only name the classes of an index, and its content is checked before it is used.
"""

import pickle
import warnings
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from moe.errors import CheckpointError

INDEX_FILE = ".metadata"

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


class _IndexUnpickler(pickle._Unpickler):
    """Reads the index of a checkpoint; rejects any other name before importing it.

    It uses the Python implementation: for a damaged position of a value, the one in C allocates so
    much memory that the system kills the process.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Returns a class that is part of an index.

        Raises:
            UnpicklingError: For any other name.
        """
        if (module, name) in _ADMITTED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]

        # The folder in which the checkpoint was written.
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return PurePath
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which never occurs in the index of a checkpoint, and may have been made to run "
            "code; nothing was executed"
        )


class _Reader(FileSystemReader):
    """torch's reader of checkpoints, with a safe index."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Returns the index."""
        index = read_index(Path(self.path))
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

        # Each piece of a tensor is in a file of this checkpoint.
        for location in index.storage_data.values():
            name = location.relative_path
            if name != PurePath(name).name:
                raise ValueError(f"a shard is {name}, which is not a file of the checkpoint")
    except Exception as error:
        raise CheckpointError(
            f"{file} is no index of shards ({type(error).__name__}: {error}). Resume from another checkpoint, or start "
            "a new run."
        ) from error
    return index


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors of a checkpoint, by name.

    Raises:
        CheckpointError: See `read_index`.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, entry in read_index(path).state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{path / INDEX_FILE}: {name} is not a tensor.")
        shapes[name] = tuple(entry.size)
    return shapes


def read_into(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fills tensors <any>[...], whole or sharded, from a checkpoint, by name.

    Raises:
        CheckpointError: When a rank cannot read its parts.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            load(tensors, storage_reader=_Reader(path))
        except CheckpointException as failed:
            rank, error = cause_of(failed)
            raise CheckpointError(
                f"{path} could not be read: rank {rank} failed with {error!r}."
            ) from failed


def cause_of(failed: CheckpointException) -> tuple[int, BaseException]:
    """Returns a rank that failed, and how: the first with an error of the disk, else the first."""
    ranks = sorted(failed.failures)
    for rank in ranks:
        error = failed.failures[rank][0]
        if isinstance(error, OSError):
            return rank, error
    return ranks[0], failed.failures[ranks[0]][0]
