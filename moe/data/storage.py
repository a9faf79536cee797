"""Folders and files that appear whole or not at all, and lines that may end torn."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe.errors import DataError


@contextmanager
def whole_folder(target: Path, *, marker: str) -> Iterator[Path]:
    """Gives an empty sibling folder to fill; when the block ends well, it becomes `target`.

    A run killed half-way leaves `target` as it was, and a hidden `.partial` sibling that the next run removes. An
    earlier folder of the same kind is replaced; anything else is left alone.

    Args:
        target: The folder to make.
        marker: A file name found in every folder of this kind: only a folder that has it may be replaced.

    Raises:
        DataError: When `target` exists, is not empty and lacks the marker, or is a file.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100  resolve() would write to the far end of a link
    check_replaceable(target, marker=marker)
    partial = target.with_name(f".{target.name}.partial")
    replaced = target.with_name(f".{target.name}.replaced")
    if replaced.exists() and not target.exists():
        replaced.rename(target)  # a run was killed between the two renames below
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if target.exists():
            target.rename(replaced)
        partial.rename(target)
    finally:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def check_replaceable(target: Path, *, marker: str) -> None:
    """Raises when writing to `target` would delete something that is not ours.

    Raises:
        DataError: When `target` exists, is not empty and lacks the file `marker`, or is a file.
    """
    if not target.exists() or (target / marker).is_file():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise DataError(
            f"{target} exists and holds something else (it has no {marker}), so it is not overwritten. "
            "Choose another folder, or move it away."
        )


@contextmanager
def locked_folder(folder: Path, taken: str) -> Iterator[None]:
    """Makes the folder, and holds it inside the block; the lock goes with the process, however it ends.

    Raises:
        DataError: With the text `taken`, when another process holds it.
    """
    import fcntl  # Unix alone has it, and `import moe` reads this file

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(taken) from error
        yield


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Gives a sibling path to write to; when the block ends well, that file becomes `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the JSON objects of a file that is written line by line; a torn last line is left out.

    Raises:
        DataError: When the file is missing, or another line is no JSON object.
    """
    if not path.is_file():
        raise DataError(f"There is no {path}. Give a file of JSON lines, e.g. the metrics.jsonl of a run.")
    lines = path.read_text(encoding="utf-8").splitlines()
    values: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            values.append(value)
        elif number < len(lines):
            raise DataError(f"{path}, line {number}: {line[:60]!r} is no JSON object. Restore the file.")
    return values
