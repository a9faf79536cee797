"""Hidden folders in which files and folders are built before they get their final name.

`target` is made inside `.target.partial` next to it, which contains our marker. A link, a file, or a
folder without the marker under that name belongs to the user: it is left alone, and
`.target.partial2` is used instead. `moe.files` builds on them.
"""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moe.errors import DataError
from moe.opening import NoRegularFileError, open_to_write

# The new file or folder in a work folder, and the earlier one that it replaces.
PARTIAL = "partial"
REPLACED = "replaced"

# Marks a work folder as ours, and is locked while the folder is in use.
_MARKER = ".stmoe-partial"


class TakenError(DataError):
    """Raised if another process works on the same target."""


@contextmanager
def work_folder(target: Path, *, wait: bool) -> Iterator[Path]:
    """Makes the work folder of a target for this process only, and removes it at the end.

    Remains of a killed process in it are removed first, and the target it was replacing is restored.

    Args:
        target: File or folder to be made; its parent exists.
        wait: Whether to wait for another process that works on the same target.

    Raises:
        DataError: When another process works on it and `wait` is not set.
    """
    work, descriptor = _claim(target, wait=wait)
    with closed_at_the_end(descriptor):
        try:
            _put_back(work, target)
            _remove_content(work)
            yield work
        finally:
            _put_back(work, target)
            _remove_content(work)
            # The marker is written last: a folder without it is not ours unless it is empty.
            with suppress(OSError):
                if [path.name for path in work.iterdir()] == [_MARKER]:
                    (work / _MARKER).unlink()
                    work.rmdir()


def _claim(target: Path, *, wait: bool) -> tuple[Path, int]:
    """Makes a work folder with its marker.

    Returns:
        The folder, and the descriptor of the marker, which holds the lock.
    """
    number = 1
    while True:
        work = target.with_name(f".{target.name}.partial{number if number > 1 else ''}")
        with suppress(FileExistsError):
            work.mkdir()
        try:
            descriptor = _open_marker(work)
        except FileNotFoundError:  # another process has finished in between
            continue
        if descriptor is None:
            number += 1
            continue

        if not lock_file(descriptor, wait=wait):
            os.close(descriptor)
            raise TakenError(
                f"Another process is writing {target}. Wait for it, or choose another folder."
            )
        if _is_still(descriptor, work / _MARKER):
            return work, descriptor
        os.close(descriptor)


def _open_marker(work: Path) -> int | None:
    """Returns a descriptor of the marker in a work folder; None when the folder is not ours.

    Raises:
        FileNotFoundError: When another process has removed the folder.
    """
    if not stat.S_ISDIR(work.lstat().st_mode) or _is_users(work):
        return None
    try:
        return open_to_write(work / _MARKER, os.O_RDWR | os.O_CREAT)
    except NoRegularFileError:
        return None


def _is_users(work: Path) -> bool:
    """Returns whether a folder has content but no marker.

    The marker is a work folder's first and last file. One check is not enough: other processes may
    remove the folder and make it again between reading the marker and reading the content.
    """
    marker = work / _MARKER
    return all(not os.path.lexists(marker) and any(work.iterdir()) for _ in range(20))


def _put_back(work: Path, target: Path) -> None:
    """Restores what a killed or failed process was replacing."""
    replaced = work / REPLACED
    if replaced.exists() and not os.path.lexists(target):
        replaced.rename(target)


def _remove_content(work: Path) -> None:
    """Removes everything in a work folder except the marker, as far as possible."""
    for path in work.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != _MARKER:
            path.unlink(missing_ok=True)


def _is_still(descriptor: int, path: Path) -> bool:
    """Returns whether an open file is the one that is now at `path`."""
    try:
        status_at_path = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), status_at_path)


def lock_file(descriptor: int, *, wait: bool) -> bool:
    """Locks an open file until it is closed.

    Returns:
        False if another process holds it and `wait` is not set.
    """
    import fcntl  # It exists only on Unix, and `import moe` reads this file

    mode = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
    try:
        fcntl.flock(descriptor, mode)
    except BlockingIOError:
        return False
    return True


_locks: set[int] = set()


@contextmanager
def closed_at_the_end(descriptor: int) -> Iterator[None]:
    """Closes a lock after the block, and in forks, which would hold it after their parent ends."""
    _locks.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _locks:  # a fork has closed it
            _locks.remove(descriptor)
            os.close(descriptor)


def _leave_locks_to_the_parent() -> None:
    for descriptor in _locks:
        os.close(descriptor)
    _locks.clear()


if hasattr(os, "register_at_fork"):  # Unix alone forks
    os.register_at_fork(after_in_child=_leave_locks_to_the_parent)
