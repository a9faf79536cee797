"""Weights in files, read one at a time: safetensors or torch's .bin, sharded or not, of a folder or
the hub.
"""

import pickle
import re
from collections.abc import Callable, Container, Iterable, Mapping
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

from moe.checks import shown
from moe.errors import CheckpointError
from moe.parsing import read_json, to_record

_UNREADABLE = (
    *(OSError, LookupError, RuntimeError, ValueError, TypeError, AttributeError, EOFError),
    SafetensorError,
)
"""What torch and safetensors raise for files that are torn or hold something else."""

_SHOWN_NAMES = 5

COPY_AGAIN = "Copy or download the model again."

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

    It has what transformers asks of the values of a state dict: `dtype`, `is_floating_point` and
    `[...]`.
    """

    def __init__(
        self, shape: Iterable[int], dtype: torch.dtype, read: Callable[[], Tensor]
    ) -> None:
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
    """Keeps the file that was read last open and lets go of the one before: of many shards one is
    in memory.
    """

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
    """Returns a function from names to tensors of a file; of all but .bin files of before torch 1.6
    nothing is read.
    """
    if path.suffix == ".safetensors":
        return safe_open(path, framework="pt").get_tensor
    return torch.load(
        path, map_location="cpu", weights_only=True, mmap=is_zipfile(path)
    ).__getitem__


def open_weights(paths: Iterable[Path]) -> dict[str, LazyTensor]:
    """Returns the tensors of files by name; nothing but names and shapes is read before they are
    indexed.

    Raises:
        CheckpointError: When a file is missing, torn, or holds something else.
    """
    files, weights = _LastFile(), {}
    for path in paths:
        try:
            for name, (shape, dtype) in _shapes(path).items():
                weights[name] = LazyTensor(shape, dtype, partial(files.read, path, name))
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"The weights in {path} cannot be read: the file is torn, or holds more than tensors, which "
                f"could run code. {COPY_AGAIN}"
            ) from error
        except _UNREADABLE as error:
            raise CheckpointError(
                f"The weights in {path} cannot be read: {_first_line(error)}"
            ) from error
    return weights


def _first_line(error: Exception) -> str:
    """Returns what an error says, without the advice that torch gives after it."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _shapes(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns shape and dtype of each tensor of a file."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            pieces = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  no mapping
            return {
                name: (tuple(p.get_shape()), dtype_of(p.get_dtype(), name))
                for name, p in pieces.items()
            }

    held = torch.load(path, map_location="meta", weights_only=True)
    if not isinstance(held, dict):
        raise TypeError(f"it holds {shown(held)}; expected tensors by name")
    for name, value in held.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise TypeError(
                f"it holds {shown(value)} under {shown(name)}; expected a tensor under a name"
            )
    return {name: (tuple(value.shape), value.dtype) for name, value in held.items()}


def dtype_of(name: str, tensor: str) -> torch.dtype:
    """Returns the dtype that safetensors calls `name`.

    Raises:
        ValueError: When it is none that is read here; names the tensor.
    """
    if name not in DTYPES:
        raise ValueError(f"{tensor} is of dtype {name}; expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def find_weight_files(
    source: Path | str,
    *,
    use_safetensors: bool | None = None,
    variant: str | None = None,
    **download: Any,
) -> list[Path]:
    """Returns the files of a model's weights, downloaded where need be; in the order in which
    transformers looks.

    Args:
        source: A folder or a name of the hub.
        use_safetensors: None takes safetensors before .bin; True and False only one of them.
        variant: Word in the files' names, as in transformers.
        download: `revision`, `token`, `cache_dir` and the like of transformers' `cached_file`.

    Raises:
        CheckpointError: When there are none, or their index is damaged.
    """
    safe, pickled = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
    names = {None: safe + pickled, True: safe, False: pickled}[use_safetensors]
    for name in names:
        path = cached_file(
            source,
            _with_variant(name, variant),
            _raise_exceptions_for_missing_entries=False,
            **download,
        )
        if path is None:
            continue
        if not name.endswith(".json"):
            return [Path(path)]

        # Shards lie beside their index; of the hub they are downloaded.
        shards = read_index(Path(path))
        try:
            files, _ = get_checkpoint_shard_files(source, path, **download)
        except _UNREADABLE as error:
            raise CheckpointError(
                f"The index of weights {path} cannot be used: {error}. {COPY_AGAIN}"
            ) from error
        if missing := [str(file) for file in files or () if not Path(file).is_file()]:
            raise CheckpointError(
                f"{missing[0]} is missing, one of the {len(shards)} files in the index {path}. {COPY_AGAIN}"
            )
        return [Path(file) for file in files or ()]
    raise CheckpointError(
        f"{source} has no weights: expected one of {', '.join(names)}. {COPY_AGAIN}"
    )


def read_index(path: Path) -> list[str]:
    """Returns the names of the files that an index of shards names.

    Raises:
        CheckpointError: When the index is damaged, or names a file in another folder.
    """
    content = read_json(path, advice=COPY_AGAIN, error=CheckpointError)
    index = to_record(
        dict[str, Any], content, where=str(path), advice=COPY_AGAIN, error=CheckpointError
    )
    for field, kind in (("weight_map", dict[str, str]), ("metadata", dict[str, Any])):
        to_record(
            kind,
            index.get(field),
            where=f"{path}: {field}",
            advice=COPY_AGAIN,
            error=CheckpointError,
        )

    names = sorted(set(index["weight_map"].values()))
    for name in names:
        if not name or Path(name).name != name:
            raise CheckpointError(
                f"{path} names the file {shown(name)}; expected one beside it. {COPY_AGAIN}"
            )
    return names


def remove_replaced_weights(
    folder: Path, written: Container[str], variant: str | None = None
) -> None:
    """Removes weights that an earlier save left in a folder, which would be read in the place of
    the new ones.

    Args:
        folder: Of a model.
        written: Names of the safetensors files of the new save, and of its index when there is one.
        variant: See `find_weight_files`.
    """
    whole, index = (
        _with_variant(SAFE_WEIGHTS_NAME, variant),
        _with_variant(SAFE_WEIGHTS_INDEX_NAME, variant),
    )
    for name in (whole, index, *find_shards(folder, variant)):
        if name not in written:
            (folder / name).unlink(missing_ok=True)


def find_shards(folder: Path, variant: str | None = None) -> list[str]:
    """Returns the names of the files in a folder that hold a part of a model each."""
    stem, ending = _with_variant(SAFE_WEIGHTS_NAME, variant).rsplit(".", 1)
    pattern = re.compile(rf"{re.escape(stem)}-\d{{5}}-of-\d{{5}}\.{ending}")
    return sorted(path.name for path in folder.iterdir() if pattern.fullmatch(path.name))


def saved_weights(folder: Path, variant: str | None = None) -> list[str]:
    """Returns the names of what transformers has just saved into a folder; of earlier shards it
    leaves none.
    """
    shards = find_shards(folder, variant)
    return [
        *shards,
        _with_variant(SAFE_WEIGHTS_INDEX_NAME if shards else SAFE_WEIGHTS_NAME, variant),
    ]


def _with_variant(name: str, variant: str | None) -> str:
    """Returns the name of a file with a variant in it, as transformers names it."""
    if variant is None:
        return name
    stem, ending = name.rsplit(".", 1)
    return f"{stem}.{variant}.{ending}"


def refuse_integers(
    source: Path | str, expected: Mapping[str, Tensor], stored: Mapping[str, torch.dtype | None]
) -> None:
    """Raises when a weight of floating point is stored as integers, which would be taken for its
    numbers.

    Args:
        source: The folder or hub name.
        expected: Tensors of a model by name; they need no memory.
        stored: Dtype of each stored tensor by name; None for one that torch has not.

    Raises:
        CheckpointError: Names the first.
    """
    for name, tensor in expected.items():
        dtype = stored.get(name)
        if tensor.is_floating_point() and dtype is not None and not dtype.is_floating_point:
            raise CheckpointError(
                f"{name} in {source} holds numbers of type {dtype}; expected floating-point ones. {COPY_AGAIN}"
            )


def check_finite(name: str, weight: Tensor, source: Path | str) -> None:
    """Raises when a weight holds NaN or infinity.

    Args:
        name: Of the weight.
        weight: <any>[...] its numbers; of quantised ones nothing is said.
        source: The folder or hub name.

    Raises:
        CheckpointError: Names the weight, with its least and largest number.
    """
    ordinary = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    if weight.dtype not in ordinary or weight.numel() == 0:
        return
    least, largest = weight.aminmax()  # one pass over them
    if not (largest.float() - least.float()).isfinite():
        raise CheckpointError(
            f"{name} in {source} holds numbers that are not finite: from {least.item()} to {largest.item()}. Load "
            "an earlier checkpoint: training diverged, or the file is damaged."
        )


def incomplete(source: Path | str, kind: str, misfits: str) -> str:
    """Returns what is wrong with a folder whose weights are not those of a class, and what to do."""
    return (
        f"{source} is no complete {kind}. Weights {misfits}. Copy the whole folder again from where it was saved, or "
        "give another; if config.json was edited, undo that."
    )


def describe_misfits(
    missing: Iterable[str],
    unexpected: Iterable[str],
    reshaped: Iterable[tuple[str, Iterable[int], Iterable[int]]],
) -> str:
    """Returns how many weights of a file do not fit a model, with the first names; an empty string
    when all fit.

    Args:
        missing: Names that the model has and the file has not.
        unexpected: Names that the file has and the model has not.
        reshaped: Names that both have, with the shape in the file and the shape in the model.
    """
    shapes = [f"{name} {tuple(saved)} instead of {tuple(own)}" for name, saved, own in reshaped]
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
    return "; ".join(
        f"{len(names)} {kind}: {_some(names)}" for kind, found in kinds if (names := sorted(found))
    )


def _some(names: list[str]) -> str:
    """Returns the first few names and how many more there are."""
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more
