"""Checksums of a folder: the SHA-256 of each file as it was written, to detect damage.

`SHA256SUMS` has the format of coreutils, so `sha256sum --check SHA256SUMS` does the same as
`find_damage`.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from moe.errors import DataError

SUMS_FILE = "SHA256SUMS"
_CHUNK = 2**20  # bytes read at once


class Damage(NamedTuple):
    """A file that has changed since it was written.

    Attributes:
        name: Name of the file in its folder.
        reason: The damage, e.g. `is missing` or `has another SHA-256 than it was written with`.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} {self.reason}"


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path, digests: Mapping[str, str] | None = None) -> None:
    """Writes the checksums of a folder's files.

    Args:
        folder: Folder that is complete except for this file.
        digests: SHA-256 by the file's name relative to the folder; None to compute all.
    """
    if digests is None:
        digests = {name: sha256_of(folder / name) for name in _files_below(folder)}

    # coreutils' format: the digest, two spaces, the name.
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
    with (folder / SUMS_FILE).open("w", encoding="utf-8") as file:
        file.writelines(lines)


def read_sums(folder: Path) -> dict[str, str] | None:
    """Returns the SHA-256 of each file of a folder by name; None when it has no checksums.

    A damaged line yields an empty checksum, which no file has.
    """
    try:
        text = (folder / SUMS_FILE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None

    digests = {}
    for line in text.splitlines():
        digest, _, name = line.partition("  ")
        digests[name] = digest if re.fullmatch("[0-9a-f]{64}", digest) else ""
    return digests


def find_damage(
    folder: Path, names: Iterable[str] | None = None, *, part: int = 0, num_parts: int = 1
) -> list[Damage]:
    """Returns the damaged files of a folder; none when it has no checksums.

    Args:
        folder: Folder with or without a file of checksums.
        names: Files to check, of those with a checksum; None for all.
        part: Which of `num_parts` equal shares of the files to check, from 0.
        num_parts: Number of shares, e.g. the number of ranks.
    """
    try:
        digests = read_sums(folder)
    except OSError as error:
        return [Damage(SUMS_FILE, f"cannot be read ({error.strerror or error})")]
    if digests is None:
        return []
    if not digests:
        return [Damage(SUMS_FILE, "holds no checksum")]

    # This share of the files, hashed one by one.
    selected = digests.keys() if names is None else digests.keys() & set(names)
    damaged = []
    for name in sorted(selected)[part::num_parts]:
        try:
            if sha256_of(folder / name) != digests[name]:
                damaged.append(Damage(name, "has another SHA-256 than it was written with"))
        except FileNotFoundError:
            damaged.append(Damage(name, "is missing"))
        except (OSError, ValueError) as error:
            damaged.append(Damage(name, f"cannot be read ({error})"))
    return damaged


def refuse_damage(folder: Path, names: Iterable[str], *, advice: str) -> bool:
    """Raises for the first damaged file of a folder, and returns whether it has checksums.

    Args:
        folder: Folder with or without a file of checksums.
        names: Files to read; each should have a checksum.
        advice: Advice for the user.

    Raises:
        DataError: When one is damaged, or has no checksum although others do; names it.
    """
    digests = read_sums(folder)
    if digests is None:
        return False

    # Damaged files, and those without a checksum.
    read_names = set(names)
    damaged = find_damage(folder, read_names)
    for name in sorted(read_names - digests.keys()):
        damaged.append(Damage(name, f"is missing in {SUMS_FILE}"))

    if damaged:
        first = damaged[0]
        raise DataError(
            f"{folder / first.name} is damaged: it {first.reason}. {advice} "
            f"If it was changed on purpose, remove {SUMS_FILE}."
        )
    return True


def _files_below(folder: Path) -> list[str]:
    names = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != SUMS_FILE:
            names.append(name)
    return names


def model_fingerprint(folder: Path) -> str:
    """Returns 16 hexadecimal digits that identify the model in a folder."""
    files = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin"))
    digest = hashlib.sha256()
    for path in (*files, folder / "config.json"):
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()[:16]
