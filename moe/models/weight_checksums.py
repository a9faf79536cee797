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
    return sorted(
        {path.name for pattern in _PATTERNS for path in folder.glob(pattern) if path.is_file()}
    )


def forget_weight_sums(folder: Path) -> None:
    """Removes the checksums of a folder's weights, which are about to be written; those of other
    files stay.
    """
    if not (folder / SUMS_FILE).is_file():
        return
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
    with ThreadPoolExecutor(_THREADS) as pool:  # hashing lets go of Python's lock
        computed = pool.map(sha256_of, [folder / name for name in unknown])
        weights = {**known, **dict(zip(unknown, computed, strict=True))}
    if weights:
        write_sums(folder, {**_other_sums(folder), **weights})


def check_weights(folder: Path) -> None:
    """Raises when the weights in a folder are not those that were saved; a folder without checksums
    is not checked.

    Raises:
        CheckpointError: Names the first damaged file.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        shares = pool.map(
            lambda part: find_damage(folder, part=part, num_parts=_THREADS), range(_THREADS)
        )
        damaged = [damage for share in shares for damage in share]
    _refuse(folder, damaged)


@contextmanager
def checking_weights(folder: Path) -> Iterator[None]:
    """Does what `check_weights` does beside the block, on other cores; what is damaged is said
    before other errors.

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
    """Does what `check_weights` does, dealt out over the ranks; every rank must call it."""
    _refuse(folder, gather_damage(folder))


def _other_sums(folder: Path) -> dict[str, str]:
    """Returns the checksums in a folder that are of no weights."""
    sums = read_sums(folder) or {}
    return {
        name: digest
        for name, digest in sums.items()
        if digest and not any(fnmatch(name, pattern) for pattern in _PATTERNS)
    }


def _refuse(folder: Path, damaged: Sequence[Damage]) -> None:
    """Raises a CheckpointError when there is damage."""
    if damaged:
        raise CheckpointError(
            f"The model in {folder} is damaged: {damaged[0]}. Copy the whole folder again from where it was saved; "
            f"if another tool rewrote the weights on purpose, remove {folder / SUMS_FILE}."
        )
