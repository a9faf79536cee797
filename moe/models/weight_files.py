"""Weights in files, read one at a time: safetensors or torch's .bin, sharded or not, of a folder or the hub."""

import pickle
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from moe.errors import CheckpointError

_UNREADABLE = (
    *(OSError, LookupError, RuntimeError, ValueError, TypeError, AttributeError, EOFError),
    *(SafetensorError, pickle.UnpicklingError),
)
"""What torch, safetensors and json raise for files that are torn or hold something else."""

DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of safetensors, in the order in which it lays tensors into a file."""


class LazyTensor:
    """A tensor <any>[...] of known shape and dtype whose numbers are read when it is indexed.

    It has what transformers asks of the values of a state dict: `dtype`, `is_floating_point` and `[...]`.
    """

    def __init__(self, shape: Iterable[int], dtype: torch.dtype, read: Callable[[], Tensor]) -> None:
        self.shape, self.dtype, self.read = tuple(shape), dtype, read

    def is_floating_point(self) -> bool:
        """Returns whether its numbers are."""
        return self.dtype.is_floating_point

    def __getitem__(self, index: Any) -> Tensor:
        return self.read()[index]

    def empty(self) -> Tensor:
        """Returns a tensor <any>[...] of the same shape and dtype without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class _LastFile:
    """Keeps the file that was read last open and lets go of the one before: of many shards one is in memory."""

    def __init__(self) -> None:
        self._lock, self._path = Lock(), None
        self._get: Callable[[str], Tensor] = lambda name: torch.empty(0)

    def read(self, path: Path, name: str) -> Tensor:
        """Returns a tensor <any>[...] of a file; it may be a view of the file's pages."""
        with self._lock:
            if path != self._path:
                self._path, self._get = path, _open(path)
            return self._get(name)


def _open(path: Path) -> Callable[[str], Tensor]:
    """Returns a function from names to tensors of a file; of all but .bin files of before torch 1.6 nothing is read."""
    if path.suffix == ".safetensors":
        return safe_open(path, framework="pt").get_tensor
    return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path)).__getitem__


def open_weights(paths: Iterable[Path]) -> dict[str, LazyTensor]:
    """Returns the tensors of files by name; nothing but names and shapes is read before they are indexed.

    Raises:
        CheckpointError: When a file is missing, torn, or holds something else.
    """
    files, weights = _LastFile(), {}
    for path in paths:
        try:
            for name, (shape, dtype) in _shapes(path).items():
                weights[name] = LazyTensor(shape, dtype, partial(files.read, path, name))
        except _UNREADABLE as error:
            raise CheckpointError(f"The weights in {path} cannot be read: {_first_line(error)}") from error
    return weights


def _first_line(error: Exception) -> str:
    """Returns what an error says, without the advice that torch gives after it."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _shapes(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns shape and dtype of each tensor of a file."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            pieces = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  no mapping
            return {name: (tuple(p.get_shape()), DTYPES[p.get_dtype()]) for name, p in pieces.items()}
    held = torch.load(path, map_location="meta", weights_only=True)
    return {name: (tuple(value.shape), value.dtype) for name, value in held.items() if isinstance(value, Tensor)}


def find_weight_files(source: Path | str, *, use_safetensors: bool | None = None, **download: Any) -> list[Path]:
    """Returns the files of a model's weights, downloaded where need be.

    Args:
        source: A folder or a name of the hub.
        use_safetensors: None takes safetensors before .bin; True and False only one of them.
        download: `revision`, `token`, `cache_dir` and the like of transformers' `cached_file`.

    Raises:
        CheckpointError: When there are none.
    """
    safe, pickled = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
    names = {None: safe + pickled, True: safe, False: pickled}[use_safetensors]
    for name in names:
        path = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **download)
        if path is None:
            continue
        if not name.endswith(".json"):
            return [Path(path)]
        try:
            shards, _ = get_checkpoint_shard_files(source, path, **download)
        except _UNREADABLE as error:
            raise CheckpointError(f"The index of weights {path} cannot be used: {error}") from error
        return [Path(shard) for shard in shards or ()]
    raise CheckpointError(f"{source} has no weights: expected one of {', '.join(names)}. Copy or download it again.")
