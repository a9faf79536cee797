"""Files of a model's weights: found, read one tensor at a time, and checked against checksums.

They are safetensors or torch's .bin files, in a folder or on the hub.

A weight W <float>[..., O, I] may be stored in 8 bits, as two tensors: `NAME_q` <int8>[..., O, I] and
`NAME_scale` <float>[..., O, 1] in the dtype of the weight. W = scale * q, where scale = max |W| / 127
over the I numbers of a row (in an embedding, of a token), and q = round(W / scale). In 4 bits there is
`NAME_zero`, too; see `QuantizedWeight`. NAME is the weight's whole name in the model, e.g.
`lm_head.weight_q`. Readers get floats; experts stay quantized in memory if the config has
`expert_quantization`.
"""

import os
import pickle
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from itertools import chain
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
from transformers.utils.hub import get_checkpoint_shard_files

from moe.checksums import SUMS_FILE, Damage, find_damage, read_sums, sha256_of, write_sums
from moe.distributed.verification import gather_damage
from moe.errors import CheckpointError
from moe.kernels.expert_weights import is_quantized
from moe.kernels.quantized_weight import QuantizedWeight
from moe.models.checkpoint_formats import COPY_AGAIN, read_json_object
from moe.models.transformers_private import find_file

_UNREADABLE = (
    OSError,
    LookupError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    EOFError,
    SafetensorError,
)
"""Exceptions of torch and safetensors for files that are torn or hold something else."""

_MAX_NAMES = 5
_PATTERNS = ("model*.safetensors", "model*.safetensors.index*.json", "adapter_model.safetensors")
_THREADS = 4

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
"""Names of safetensors, in the order of tensors in a file."""

_CHECKED_FOR_NAN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


# ---------------------------------------------------------------------------
# Tensors that are read when they are needed


class LazyTensor:
    """A tensor <any>[...] of known shape and dtype whose numbers are read when it is indexed.

    It has what transformers needs of the values of a state dict: `dtype`, `is_floating_point` and
    `[...]`. Iterating over the stacked weights of experts reads one expert at a time.

    Attributes:
        read: Reads it; by default what `read_each` yields.
        read_quantized: Reads it as a QuantizedWeight; None for a weight that is stored as it is.
        read_each: Yields the tensors [...] along its first dimension; None for those of `read`.
    """

    def __init__(
        self,
        shape: Iterable[int],
        dtype: torch.dtype,
        read: Callable[[], Tensor] | None = None,
        read_quantized: Callable[[], QuantizedWeight] | None = None,
        read_each: Callable[[], Iterator[Tensor]] | None = None,
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.read = read or self._stack
        self.read_quantized = read_quantized
        self.read_each = read_each

    def _stack(self) -> Tensor:
        return torch.stack(list(self))

    def is_floating_point(self) -> bool:
        """Returns whether its numbers are."""
        return self.dtype.is_floating_point

    def __getitem__(self, index: Any) -> Tensor:
        return self.read()[index]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.read()) if self.read_each is None else self.read_each()

    def empty(self) -> Tensor:
        """Returns a tensor <any>[...] of the same shape and dtype without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class _FileReader:
    """Reads tensors of files, keeping only the last file open, so that one shard is in memory."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._path: Path | None = None
        self._get_tensor: Callable[[str], Tensor] = lambda name: torch.empty(0)

    def read(self, path: Path, name: str) -> Tensor:
        """Returns a tensor <any>[...] of a file; it may be a view of the file's pages."""
        with self._lock:
            if path != self._path:
                self._get_tensor = _open_file(path)
                self._path = path
            return self._get_tensor(name)


def _open_file(path: Path) -> Callable[[str], Tensor]:
    """Returns a function from names to tensors of a file; nothing is read yet.

    A .bin file older than torch 1.6, which is not a zip file, is read completely.
    """
    if path.suffix == ".safetensors":
        return safe_open(path, framework="pt").get_tensor
    tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    return tensors.__getitem__


def open_weights(paths: Iterable[Path]) -> dict[str, LazyTensor]:
    """Returns the weights of files by name; only names and shapes are read before they are indexed.

    Raises:
        CheckpointError: When a file is missing, torn, or holds something else, or a quantized weight
            has no scales.
    """
    reader = _FileReader()
    weights: dict[str, LazyTensor] = {}
    for path in paths:
        try:
            for name, header in _read_headers(path).items():
                read = partial(reader.read, path, name)
                weights[name] = LazyTensor(header.shape, header.dtype, read)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"The weights in {path} cannot be read: the file is incomplete, or holds more than tensors, which "
                f"could run code. {COPY_AGAIN}"
            ) from error
        except _UNREADABLE as error:
            reason = _first_line(error)
            raise CheckpointError(f"The weights in {path} cannot be read: {reason}") from error
    return _join_parts(weights)


def _first_line(error: Exception) -> str:
    """Returns the text of an error without the advice that torch appends."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0]


def _read_headers(path: Path) -> dict[str, Tensor]:
    """Returns the tensors <any>[...] of a file without memory, by name."""
    headers: dict[str, Tensor] = {}
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  no mapping
                piece = file.get_slice(name)
                dtype = DTYPES[piece.get_dtype()]
                headers[name] = torch.empty(piece.get_shape(), dtype=dtype, device="meta")
        return headers

    # A .bin is a pickle; only tensors are accepted, and they use no memory on the meta device.
    tensors = torch.load(path, map_location="meta", weights_only=True)
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise TypeError("it does not hold tensors by name")
    return tensors


# ---------------------------------------------------------------------------
# Quantized weights


def stored_parts(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Returns the tensors <any>[...] that are saved for a weight, by name; a float weight is its own."""
    if not isinstance(weight, QuantizedWeight):
        return {name: weight}
    return {f"{name}_{part}": tensor for part, tensor in weight.parts().items()}


def stored_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors <any>[...] that are saved for a state dict, by name."""
    stored: dict[str, Tensor] = {}
    for name, weight in state.items():
        stored.update(stored_parts(name, weight))
    return stored


def _join_parts(stored: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Returns the weights of files by the names of the model; see `open_weights`."""
    weights = dict(stored)
    for codes_name, codes in stored.items():
        if not codes_name.endswith("_q") or codes.dtype not in (torch.int8, torch.uint8):
            continue
        name = codes_name.removesuffix("_q")
        del weights[codes_name]
        scale = weights.pop(f"{name}_scale", None)
        zero = weights.pop(f"{name}_zero", None)
        if scale is None:
            raise CheckpointError(
                f"The weights hold {codes_name} but no {name}_scale. {COPY_AGAIN}"
            )
        parts = [codes, scale] if zero is None else [codes, scale, zero]
        weights[name] = _quantized_tensor(parts)
    return weights


def _quantized_tensor(parts: Sequence[LazyTensor]) -> LazyTensor:
    """Returns a weight that is stored as the parts of a QuantizedWeight, which may be pages of the file."""

    def read_quantized() -> QuantizedWeight:
        return QuantizedWeight(*(part.read() for part in parts))

    def read() -> Tensor:
        return read_quantized().dequantize()

    def read_each() -> Iterator[Tensor]:
        for parts_of_expert in zip(*parts, strict=True):
            yield QuantizedWeight(*parts_of_expert).dequantize()

    empty = QuantizedWeight(*(part.empty() for part in parts))
    return LazyTensor(empty.shape, empty.dtype, read, read_quantized, read_each)


def keep_quantized_experts(stored: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Returns the weights of files with those of experts' products read as they are stored."""
    weights = dict(stored)
    for name, weight in stored.items():
        if weight.read_quantized is not None and re.search(r"\.experts\.\w+_proj$", name):
            weights[name] = LazyTensor(weight.shape, weight.dtype, weight.read_quantized)
    return weights


# ---------------------------------------------------------------------------
# Finding the files


def find_weight_files(
    source: Path | str, *, use_safetensors: bool | None = None, **download: Any
) -> list[Path]:
    """Returns the files of a model's weights, downloaded if necessary.

    Args:
        source: A folder or a name of the hub.
        use_safetensors: None prefers safetensors to .bin; True and False accept only one of them.
        download: `revision`, `token`, `cache_dir` and the like of transformers' `cached_file`.

    Raises:
        CheckpointError: When there are none, or their index is damaged.
    """
    # transformers' search order.
    names: list[str] = []
    if use_safetensors is not False:
        names += [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME]
    if use_safetensors is not True:
        names += [WEIGHTS_NAME, WEIGHTS_INDEX_NAME]

    for name in names:
        path = find_file(source, name, **download)
        if path is None:
            continue
        if name.endswith(".json"):
            return _find_shards_of_index(source, path, download)
        return [path]

    raise CheckpointError(
        f"{source} has no weights: expected one of {', '.join(names)}. {COPY_AGAIN} stmoe convert merges adapters."
    )


def _find_shards_of_index(
    source: Path | str, path: Path, download: Mapping[str, Any]
) -> list[Path]:
    """Returns the files listed in an index: next to it, or downloaded from the hub."""
    try:
        files, _ = get_checkpoint_shard_files(source, str(path), **download)
        paths = [Path(file) for file in files or ()]
    except _UNREADABLE as error:
        raise CheckpointError(
            f"The index of weights {path} cannot be used: {_first_line(error)}. {COPY_AGAIN}"
        ) from error
    check_files(source, paths)
    return paths


def names_in_index(source: Path | str, **download: Any) -> list[str]:
    """Returns the names of a model's weights in the index of its files; none if there is no index.

    Args:
        source: A folder or a name of the hub, of which only the index is downloaded.
        download: See `find_weight_files`.

    Raises:
        CheckpointError: When the index is damaged.
    """
    for name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        path = find_file(source, name, **download)
        if path is not None:
            weight_map = read_json_object(path).get("weight_map")
            return list(weight_map) if isinstance(weight_map, dict) else []
    return []


def check_files(source: Path | str, paths: Iterable[Path]) -> None:
    """Raises unless the files of a model exist, and those of a folder are inside of it.

    Raises:
        CheckpointError: Names the first that is not.
    """
    folder = os.path.realpath(source) if Path(source).is_dir() else None
    for path in paths:
        parent = os.path.realpath(path.parent)
        if folder is not None and os.path.commonpath([folder, parent]) != folder:
            raise CheckpointError(
                f"{path} is not in {source}, but its index lists it. {COPY_AGAIN}"
            )
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing, or no file, but an index lists it. {COPY_AGAIN}"
            )


def find_shards(folder: Path) -> list[str]:
    """Returns the names of the files in a folder that each hold a part of a model."""
    digits = "[0-9]" * 5
    return sorted(path.name for path in folder.glob(f"model-{digits}-of-{digits}.safetensors"))


def saved_weights(folder: Path) -> list[str]:
    """Returns the names of the files that transformers has just saved into a folder.

    It removes earlier shards.
    """
    shards = find_shards(folder)
    return [*shards, SAFE_WEIGHTS_INDEX_NAME if shards else SAFE_WEIGHTS_NAME]


def remove_replaced_weights(folder: Path, written: Container[str]) -> None:
    """Removes weights of an earlier save, which would be read instead of the new ones.

    Args:
        folder: Folder of a model.
        written: Names of the safetensors files of the new save, and of its index when there is one.
    """
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, *find_shards(folder)):
        if name not in written:
            (folder / name).unlink(missing_ok=True)


# ---------------------------------------------------------------------------
# Weights that do not fit a model


def check_finite(name: str, weight: Tensor, source: Path | str) -> None:
    """Raises when a weight holds NaN or infinity.

    Args:
        name: Name of the weight.
        weight: <any>[...] its numbers; if torchao quantised it, its scales are checked.
        source: The folder or hub name.

    Raises:
        CheckpointError: Names the weight, with its least and largest number.
    """
    # A quantised weight is finite if its scales are, and supports few operations.
    if is_quantized(weight):
        weight = getattr(weight, "scale", torch.empty(0))
    if weight.dtype not in _CHECKED_FOR_NAN or weight.numel() == 0:
        return

    # One pass over the numbers; NaN comes through both.
    least, largest = weight.aminmax()
    span = largest.float() - least.float()
    if not span.isfinite():
        raise CheckpointError(
            f"{name} in {source} holds numbers that are not finite: from {least.item()} to "
            f"{largest.item()}. Load an earlier checkpoint: training diverged, or the file is "
            "damaged."
        )


def incomplete(source: Path | str, kind: str, misfits: str) -> str:
    """Returns the message for a folder whose weights do not match a class."""
    return (
        f"{source} is not a complete {kind}. Weights {misfits}. Copy the whole folder again from "
        "where it was saved, or give another; if config.json was edited, undo that."
    )


def describe_misfits(
    missing: Iterable[str], unexpected: Iterable[str], reshaped: Iterable[str]
) -> str:
    """Returns how many weights of a file do not fit a model, with the first names.

    Args:
        missing: Names in the model but not in the file.
        unexpected: Names in the file but not in the model.
        reshaped: Results of `describe_reshaped` for names that both have.

    Returns:
        Empty if all match.
    """
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": reshaped}
    listed = {kind: list(names) for kind, names in kinds.items()}
    parts = [
        f"{len(names)} {kind}: {first_names(names)}" for kind, names in listed.items() if names
    ]
    return "; ".join(parts)


def describe_reshaped(name: str, stored: Iterable[int], expected: Iterable[int]) -> str:
    """Returns the name of a weight with both of its shapes."""
    return f"{name} {tuple(stored)} instead of {tuple(expected)}"


def first_names(names: list[str]) -> str:
    """Returns the first few names and how many more there are."""
    text = ", ".join(names[:_MAX_NAMES])
    if len(names) > _MAX_NAMES:
        text += f" and {len(names) - _MAX_NAMES} more"
    return text


# ---------------------------------------------------------------------------
# Checksums of the safetensors files and their index. Config, card and tokenizer are for users to
# edit; a damaged text is visible, a flipped bit in a weight is not.


def weight_files(folder: Path) -> list[str]:
    """Returns the names of the files with a model's weights, and of their index."""
    paths = chain.from_iterable(folder.glob(pattern) for pattern in _PATTERNS)
    return sorted({path.name for path in paths if path.is_file()})


def forget_weight_sums(folder: Path) -> None:
    """Removes the checksums of weights before they are written; the checksums of other files stay."""
    # Without the sums of the weights, a file without others is removed.
    others = _other_sums(folder)
    if others:
        write_sums(folder, others)
    else:
        (folder / SUMS_FILE).unlink(missing_ok=True)


def write_weight_sums(folder: Path, digests: dict[str, str] | None = None) -> None:
    """Writes the checksums of a folder's weights; does nothing when it has none.

    Args:
        folder: Folder with the weights just written.
        digests: SHA-256 by name, of those files for which it is known.
    """
    known = digests or {}
    unknown = [name for name in weight_files(folder) if name not in known]

    # Hashing releases Python's lock.
    with ThreadPoolExecutor(_THREADS) as pool:
        paths = [folder / name for name in unknown]
        computed = dict(zip(unknown, pool.map(sha256_of, paths), strict=True))

    weights = {**known, **computed}
    if weights:
        write_sums(folder, {**_other_sums(folder), **weights})


def check_weights(folder: Path) -> None:
    """Raises when the weights in a folder are not those that were saved.

    A folder without checksums is not checked.

    Raises:
        CheckpointError: Names the first damaged file.
    """

    def find_in_part(part: int) -> list[Damage]:
        return list(find_damage(folder, part=part, num_parts=_THREADS))

    # Each thread reads a share of the files.
    with ThreadPoolExecutor(_THREADS) as pool:
        damaged = list(chain.from_iterable(pool.map(find_in_part, range(_THREADS))))
    _refuse(folder, damaged)


@contextmanager
def checking_weights(folder: Path) -> Iterator[None]:
    """Runs `check_weights` during the block, on other cores.

    Damage is raised instead of other errors, which may follow from it.

    Raises:
        CheckpointError: At the end of the block; see `check_weights`.
    """
    with ThreadPoolExecutor(1) as pool:
        check = pool.submit(check_weights, folder)
        try:
            yield
        finally:
            check.result()


def check_weights_together(folder: Path) -> None:
    """Runs `check_weights` with the files divided over the ranks; every rank must call it."""
    _refuse(folder, gather_damage(folder))


def _other_sums(folder: Path) -> dict[str, str]:
    """Returns the checksums in a folder of files that are not weights."""
    return {
        name: digest
        for name, digest in (read_sums(folder) or {}).items()
        if digest and not any(fnmatch(name, pattern) for pattern in _PATTERNS)
    }


def _refuse(folder: Path, damaged: Sequence[Damage]) -> None:
    if damaged:
        raise CheckpointError(
            f"The model in {folder} is damaged: {damaged[0]}. Copy the whole folder again from its source; if another "
            f"tool rewrote the weights on purpose, remove {folder / SUMS_FILE}."
        )
