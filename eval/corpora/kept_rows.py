"""Rows that are read out of installed packages, kept on disk until a file of the packages changes.

Parsing the source files of a few packages takes 5 to 25 seconds, and every command that uses such a
task needs its rows.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path

from eval.task import Row
from moe.data import docstrings, prose
from moe.data.docstrings import package_folder, python_files
from moe.errors import DataError
from moe.files import cache_folder, write_text
from moe.parsing import read_json

RowsBySplit = dict[str, list[Row]]


def kept_on_disk(
    *packages: str,
) -> Callable[[Callable[[], RowsBySplit]], Callable[[], RowsBySplit]]:
    """Keeps the rows that a function reads out of packages in the cache folder.

    Args:
        packages: Names of the packages whose source files it reads.
    """

    def decorate(read: Callable[[], RowsBySplit]) -> Callable[[], RowsBySplit]:
        @wraps(read)
        def read_or_load() -> RowsBySplit:
            path = cache_folder() / f"rows-{_digest(read, packages)}.json"
            try:
                return read_json(path)
            except DataError:  # missing or damaged
                rows = read()

            # A read-only home folder, or a full disk, costs only time.
            with suppress(OSError, DataError):
                write_text(path, json.dumps(rows))
            return rows

        return read_or_load

    return decorate


def _digest(read: Callable[[], RowsBySplit], packages: tuple[str, ...]) -> str:
    """Returns a hash of the code that reads, and of the names, sizes and times of the files it reads."""
    digest = hashlib.sha256(sys.version.encode())
    for code in (read.__code__.co_filename, docstrings.__file__, prose.__file__):
        digest.update(Path(code).read_bytes())
    for package in packages:
        folder = package_folder(package)
        for path in python_files(folder):
            status = path.stat()
            place = path.relative_to(folder).as_posix()
            digest.update(f"{package} {place} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
