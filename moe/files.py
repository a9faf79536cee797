"""Writes files and folders atomically, and marks folders with their kind.

Folders that appear at once (a corpus, a tokenizer, a model, a checkpoint) are made by
`whole_folder`; folders that grow (a run, an evaluation) are locked by `claim_folder`. Both raise if
the folder holds something else. Modules that write a kind of folder register it.
"""

import glob
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple, TypeVar

from filelock import AcquireReturnProxy, FileLock, Timeout

from moe.checksums import SUMS_FILE, read_sums
from moe.errors import ConfigError, DataError

KIND_FILE = ".stmoe-folder"
_LOCK_FILE = ".lock"

# Ending of the names of work folders, and the earlier target in one of them.
_WORK = ".partial"
_REPLACED = "replaced"


class TakenError(DataError):
    """Raised if another process works on the same target."""


class FolderKind(NamedTuple):
    """A kind of folder that appears at once.

    Attributes:
        markers: Files that identify a folder of this kind.
        parts: Patterns of the names of all its files. Checksums do not suffice: users may edit some
            of the files, and the checksums themselves may be damaged.
    """

    markers: tuple[str, ...]
    parts: tuple[str, ...]


_KINDS: dict[str, FolderKind] = {}

_SHIPPED = ("names",)

S = TypeVar("S", bound=Path | str)


def register_folder_kind(kind: str, *, markers: Sequence[str], parts: Sequence[str]) -> str:
    """Registers a kind of folder, and returns its name; see `FolderKind`."""
    _KINDS[kind] = FolderKind(tuple(markers), tuple(parts))
    return kind


# ---------------------------------------------------------------------------
# Models that come with the library


def find_model(source: S) -> S:
    """Returns where a model is: `names` is the one in the package, unless there is such a folder here."""
    name = str(source)
    if name not in _SHIPPED or Path(name).is_dir():
        return source
    return type(source)(Path(__file__).with_name(name))


# ---------------------------------------------------------------------------
# Kinds of folders


def kind_of(folder: Path) -> str | None:
    """Returns the kind of a folder, e.g. `corpus`; None if it is not from this library."""
    # A folder that grows contains a file with its kind.
    with suppress(OSError):
        return (folder / KIND_FILE).read_text(encoding="utf-8", errors="replace").strip() or None

    # Others are recognized by their markers. If several kinds match, the one that explains the most files wins: a
    # model's folder contains a tokenizer, too.
    most_parts = 0
    best_kind = None
    for kind, (markers, _) in _KINDS.items():
        if any((folder / marker).exists() for marker in markers):
            num_parts = sum(_is_part(path.name, kind) for path in folder.iterdir())
            if num_parts > most_parts:
                most_parts = num_parts
                best_kind = kind
    return best_kind


def check_kind(folder: Path, kind: str) -> None:
    """Raises when `folder` holds something of another kind than will be written there.

    Args:
        folder: Target folder; may be absent.
        kind: Kind of folder to write, e.g. `training run`.

    Raises:
        DataError: When `folder` is a file, or a folder of another kind.
    """
    if folder.exists() and not folder.is_dir():
        raise DataError(
            f"{folder} is a file and holds something else; expected a folder for {_a(kind)}. "
            "Choose another --out."
        )

    present_kind = kind_of(folder)
    if present_kind is None and (folder / SUMS_FILE).exists():
        present_kind = "finished folder"
    if present_kind not in (None, kind):
        raise DataError(
            f"{folder} holds {_a(present_kind)}, and {_a(kind)} would be mixed with it. "
            "Choose another --out, or move it away."
        )


@contextmanager
def claim_folder(folder: Path, kind: str, *, in_use: str) -> Iterator[None]:
    """Makes a folder that grows, marks it with its kind, and locks it inside the block.

    The lock ends with the process, however that ends.

    Args:
        folder: Does not exist, is empty, is of the same kind, or holds nothing of this library.
        kind: Kind of the folder, e.g. `training run`.
        in_use: Message if another process holds the folder.

    Raises:
        DataError: When the folder holds something else, or another process has locked it.
    """
    check_kind(folder, kind)
    with locked_folder(folder, in_use):
        check_kind(folder, kind)  # it may have changed before the lock
        refuse_links(folder, kind=kind)
        kind_file = folder / KIND_FILE
        if not kind_file.exists():
            write_text(kind_file, kind + "\n")
        yield


@contextmanager
def locked_folder(folder: Path, in_use: str) -> Iterator[None]:
    """Makes a folder and locks it inside the block; the lock ends with the process.

    Raises:
        DataError: When another process holds the lock; `in_use` is the message.
        OSError: When the lock file is a link or a folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / _LOCK_FILE, in_use):
        yield


def _lock(path: Path, in_use: str, *, wait: bool = False) -> AcquireReturnProxy[FileLock]:
    """Returns the lock of a file, to be released by `with`; a file with content keeps it.

    Raises:
        TakenError: When another process holds the lock and `wait` is not set; `in_use` is the message.
    """
    # A checkpoint is begun in one thread and finished in another.
    lock = FileLock(path, thread_local=False)
    try:
        return lock.acquire(blocking=wait)
    except Timeout:
        raise TakenError(in_use) from None


# ---------------------------------------------------------------------------
# Whole or absent


@contextmanager
def work_folder(target: Path, *, wait: bool) -> Iterator[Path]:
    """Makes a hidden folder next to a target for this process only, and removes it at the end.

    Remains of killed processes are removed first, and the target that they were replacing is restored.

    Args:
        target: File or folder to be made; its parent exists.
        wait: Whether to wait for another process that works on the same target.

    Raises:
        TakenError: When another process works on it and `wait` is not set.
    """
    in_use = f"Another process is writing {target}. Wait for it, or choose another folder."
    lock_file = target.with_name(f".{target.name}.lock")
    with _lock(lock_file, in_use, wait=wait):
        try:
            _clean_up(target)
            yield Path(mkdtemp(prefix=f".{target.name}.", suffix=_WORK, dir=target.parent))
        finally:
            _clean_up(target)
            # Removed while it is locked: whoever waits for it notices, and makes another one.
            if lock_file.stat().st_size == 0:
                lock_file.unlink()


def _clean_up(target: Path) -> None:
    """Removes the work folders of a target; restores what a killed or failed process was replacing."""
    for work in target.parent.glob(f".{glob.escape(target.name)}.????????{_WORK}"):
        replaced = work / _REPLACED
        if replaced.exists() and not os.path.lexists(target):
            replaced.rename(target)
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def whole_folder(target: Path, *, kind: str) -> Iterator[Path]:
    """Yields an empty sibling folder, which becomes `target` if the block ends without an error.

    If the process is killed, `target` is unchanged, and the next run removes the hidden work folder
    next to it. An earlier folder of the same kind is replaced; anything else is left alone.

    Args:
        target: The folder to make.
        kind: Kind of the folder, e.g. `corpus`; see `register_folder_kind`.

    Raises:
        DataError: When `target` is something else or contains other files, or another process is
            writing it.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100
    target.parent.mkdir(parents=True, exist_ok=True)
    with work_folder(target, wait=False) as work:
        # From now on, no other process renames the target.
        check_replaceable(target, kind=kind)
        partial = work / "partial"
        partial.mkdir()
        yield partial

        # The target may have changed while the folder was filled.
        check_replaceable(target, kind=kind)
        if target.exists():
            target.rename(work / _REPLACED)
        partial.rename(target)


def check_replaceable(target: Path, *, kind: str) -> None:
    """Raises when replacing `target` would delete anything but a folder of this kind.

    Raises:
        DataError: When `target` is a file, a folder of another kind, or contains other files.
    """
    check_kind(target, kind)
    if not target.exists():
        return
    if Path.cwd().is_relative_to(os.path.realpath(target)):
        raise DataError(
            f"{target} holds the folder that you are in, which would be replaced. "
            "Choose another --out, or change to another folder."
        )

    # Other files are the user's.
    unknown_files = _unknown_files(target, kind)
    if unknown_files:
        raise DataError(
            f"{target} exists and holds something else ({unknown_files[0]!r} is not part of {_a(kind)}), so it is not "
            "overwritten. Choose another folder, or move that away."
        )


def refuse_links(folder: Path, *, kind: str) -> None:
    """Raises when a file in a folder that will be written is a link.

    Raises:
        DataError: Names the first; writing it would change the target of the link.
    """
    for path in sorted(folder.glob("*")):
        is_written = _is_part(path.name, kind) or path.name in (SUMS_FILE, KIND_FILE)
        may_be_users = path.name == "README.md"
        if path.is_symlink() and is_written and not may_be_users:
            raise DataError(
                f"{path} is a link, and the file behind it would be changed. "
                "Remove the link, or choose another folder."
            )


def _unknown_files(folder: Path, kind: str) -> list[str]:
    """Returns the sorted names in a folder that are not part of its kind."""
    names = {path.name for path in folder.iterdir()} - {SUMS_FILE, KIND_FILE, _LOCK_FILE}
    if kind_of(folder) is None:
        return sorted(names)

    digests = read_sums(folder) or {}
    unknown = names - {name.split("/")[0] for name in digests}
    return [name for name in sorted(unknown) if not _is_part(name, kind)]


def _is_part(name: str, kind: str) -> bool:
    return kind in _KINDS and any(fnmatch(name, pattern) for pattern in _KINDS[kind].parts)


def remove_folder(folder: Path) -> None:
    """Removes a folder, or a link to one; if killed, the folder is complete or absent.

    A killed process leaves a hidden work folder; see `remove_leftovers`.
    """
    with work_folder(folder, wait=False) as work:
        folder.rename(work / "removed")


def remove_leftovers(folder: Path, pattern: str = "*") -> None:
    """Removes remains of killed `whole_folder`, `whole_file` and `remove_folder`.

    Folders that were being replaced are restored. Work of other processes is kept.

    Args:
        folder: Parent of the folders.
        pattern: Pattern of their names, e.g. `step_*`.
    """
    for lock_file in folder.glob(f".{pattern}.lock"):
        target = lock_file.with_name(lock_file.name[1:].removesuffix(".lock"))
        with suppress(TakenError), work_folder(target, wait=False):
            pass


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Yields a path to write to; the file becomes `target` if the block ends without an error.

    If two processes write the same file at once, the second waits for the first, and may then leave
    the path unwritten.

    Raises:
        DataError: When a pipe or a device is there.
    """
    if target.exists() and not target.is_file() and not target.is_dir():
        raise DataError(f"{target} is a pipe or a device, not a regular file. Choose another name.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with work_folder(target, wait=True) as work:
        partial = work / "partial"
        yield partial
        if partial.exists():
            partial.replace(target)


def cache_folder() -> Path:
    """Returns the cache folder: `~/.cache/stmoe`, or according to `XDG_CACHE_HOME`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stmoe"


def write_text(target: Path, text: str) -> None:
    """Writes `text` to `target` in UTF-8, whole or not at all."""
    with whole_file(target) as partial:
        partial.write_text(text, encoding="utf-8")


def output_path(
    text: str | Path,
    *,
    suffix: str = "",
    option: str = "--out",
    inputs: Iterable[Path | str | None] = (),
) -> Path:
    """Returns the output path of a command, checked.

    Args:
        text: Path of a folder, or with `suffix` of a file.
        suffix: Required ending of the file, e.g. `.html`, so that no file of another kind is
            overwritten.
        option: Name of the option, for messages.
        inputs: Files and folders that are read and must not be overwritten; None for options that
            are not given.

    Raises:
        ConfigError: When it is empty, impossible, has another ending, or is inside an input or a
            finished folder.
    """
    if not str(text).strip():
        raise ConfigError(f"{option} is empty; expected a path, e.g. {option} runs/mine{suffix}.")

    path = Path(text)
    if suffix and path.suffix.lower() != suffix:
        example = path.with_suffix(suffix) if path.name else f"runs/mine{suffix}"
        raise ConfigError(
            f"{option} is {path}; expected a file that ends in {suffix}, e.g. {example}."
        )
    if suffix and path.is_dir():
        raise ConfigError(
            f"{option} {path} is a folder; expected the name of a file, e.g. {path / f'report{suffix}'}."
        )

    # Links are followed: the final location counts.
    resolved = path.resolve()
    for source in inputs:
        if source is not None and resolved.is_relative_to(Path(source).resolve()):
            raise ConfigError(
                f"{option} {path} is {source} or lies in it, which is read: the output would overwrite the input. "
                "Choose another path."
            )

    # Inside a finished folder, or in a part of one that grows.
    for part in (resolved, *resolved.parents):
        folder = part.parent
        kind = kind_of(folder)
        is_finished = (folder / SUMS_FILE).exists()
        is_part = (folder / KIND_FILE).exists() and _is_part(part.name, kind or "")
        if kind is not None and (is_finished or is_part):
            raise ConfigError(
                f"{option} {path} lies in {folder}, {_a(kind)}. Choose another place."
            )
    return path


# ---------------------------------------------------------------------------
# Names


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
