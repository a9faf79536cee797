"""Checksums of a model's weights: written when it is saved, checked when it is loaded.

They are of the safetensors files and their index alone. Config, generation config, card and
tokenizer are for users to edit; a damaged text shows itself, a flipped bit of a weight does not.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from moe.checksums import SUMS_FILE, Damage, find_damage, read_sums, sha256_of, write_sums
from moe.distributed.verification import gather_damage
from moe.errors import CheckpointError

_PATTERNS = ("model*.safetensors", "model*.safetensors.index*.json")
_THREADS = 4


def weight_files(folder: Path) -> list[str]:
    """Returns the names of the files with a model's weights, and of their index."""
    names: set[str] = set()
    for pattern in _PATTERNS:
        names.update(path.name for path in folder.glob(pattern) if path.is_file())
    return sorted(names)


def forget_weight_sums(folder: Path) -> None:
    """Removes the checksums of weights that are about to be written; those of other files stay."""
    if not (folder / SUMS_FILE).is_file():
        return

    # Without the sums of the weights, a file without others is removed.
    others = _other_sums(folder)
    if others:
        write_sums(folder, others)
    else:
        (folder / SUMS_FILE).unlink()


def write_weight_sums(folder: Path, digests: dict[str, str] | None = None) -> None:
    """Writes the checksums of a folder's weights; does nothing when it has none.

    Args:
        folder: With the weights as they were just written.
        digests: SHA-256 by name, of those files for which it is known.
    """
    known = digests or {}
    unknown = [name for name in weight_files(folder) if name not in known]

    # Hashing lets go of Python's lock.
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
    damaged: list[Damage] = []
    with ThreadPoolExecutor(_THREADS) as pool:
        for part in pool.map(find_in_part, range(_THREADS)):
            damaged += part
    _refuse(folder, damaged)


@contextmanager
def checking_weights(folder: Path) -> Iterator[None]:
    """Runs `check_weights` beside the block, on other cores.

    Damage is raised in the place of other errors, which may follow from it.

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
    """Runs `check_weights` with the files shared out over the ranks; every rank must call it."""
    _refuse(folder, gather_damage(folder))


def _other_sums(folder: Path) -> dict[str, str]:
    """Returns the checksums in a folder that are of no weights."""
    others: dict[str, str] = {}
    for name, digest in (read_sums(folder) or {}).items():
        is_weights = any(fnmatch(name, pattern) for pattern in _PATTERNS)
        if digest and not is_weights:
            others[name] = digest
    return others


def _refuse(folder: Path, damaged: Sequence[Damage]) -> None:
    if damaged:
        raise CheckpointError(
            f"The model in {folder} is damaged: {damaged[0]}. Copy the whole folder again from "
            "where it was saved; if another tool rewrote the weights on purpose, remove "
            f"{folder / SUMS_FILE}."
        )
