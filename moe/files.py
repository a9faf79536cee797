"""Files and folders that are whole or absent, and that say what they are.

A folder that appears at once (a corpus, a tokenizer, a model, a checkpoint) is filled by
`whole_folder`; one that grows (a run, an evaluation) is held by `claim_folder`. Both refuse a
folder of another kind.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

from moe.checks import check
from moe.checksums import SUMS_FILE, read_sums
from moe.errors import ConfigError, DataError

KIND_FILE = ".stmoe-folder"
_LOCK_FILE = ".lock"

# What tells a folder of each kind, for those without a KIND_FILE: appeared at once, or made by an
# earlier version. In order: a model's folder holds a tokenizer too, a job's folder the metrics of
# its runs.
_MARKERS = {
    "corpus": ("corpus.json",),
    "best model": ("scores.json",),
    "checkpoint": ("state.json", ".metadata"),
    "job": ("settings.json",),
    "evaluation": ("report.json", "predictions"),
    "comparison": ("compare.json",),
    "harness evaluation": (),
    "training run": ("recipe.yaml", "checkpoints", "metrics.jsonl"),
    "model": ("config.json", "model.safetensors", "model.safetensors.index.json"),
    "tokenizer": ("tokenizer.json", "spiece.model"),
}
FOLDER_KINDS = tuple(_MARKERS)

# Patterns of what a folder of a kind is written with, whatever its checksums say: files that have
# none since users may edit them, and all of those whose checksums may be damaged.
_PARTS = {
    "checkpoint": ("__*.distcp", ".metadata", "state.json"),
    "model": (
        "model*.safetensors",
        "model.safetensors.index*.json",
        "config.json",
        "generation_config.json",
        "README.md",
        "modeling_st_moe.py",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "spiece.model",
        "tokenizer.model",
    ),
}


# ---------------------------------------------------------------------------
# What a folder is


def kind_of(folder: Path) -> str | None:
    """Returns which of `FOLDER_KINDS` a folder is; None when it is none of them."""
    try:
        told = (folder / KIND_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        told = ""
    if told:
        return told

    for kind, markers in _MARKERS.items():
        if any((folder / marker).exists() for marker in markers):
            return kind
    return None


def check_kind(folder: Path, kind: str) -> None:
    """Raises when something of another kind would be mixed with what is to be written.

    Args:
        folder: Where it will be written; may be absent.
        kind: What it is, one of `FOLDER_KINDS`.

    Raises:
        DataError: When `folder` is a file, or a folder of another kind.
    """
    _refuse_nul(folder)
    assert kind in FOLDER_KINDS, f"{kind!r} is none of {FOLDER_KINDS}"
    if folder.exists() and not folder.is_dir():
        raise DataError(
            f"{folder} is a file and holds something else; expected a folder for {_a(kind)}. Choose another --out."
        )

    if folder.is_symlink() and not folder.exists():
        raise DataError(f"{folder} is a link to nothing. Remove the link, or choose another --out.")

    found = kind_of(folder)
    if found not in (None, kind):
        raise DataError(
            f"{folder} holds {_a(found)}, and {_a(kind)} would be mixed with it. Choose another --out, or move it away."
        )


@contextmanager
def claim_folder(folder: Path, kind: str, *, taken: str) -> Iterator[None]:
    """Makes a folder that grows, writes into it what it is, and holds it inside the block.

    The lock goes with the process, however it ends.

    Args:
        folder: New, empty, of the same kind, or without anything of this library.
        kind: One of `FOLDER_KINDS`.
        taken: What the user is told when another process holds the folder.

    Raises:
        DataError: When the folder is of another kind, or another process holds it.
    """
    check_kind(folder, kind)
    with locked_folder(folder, taken):
        check_kind(folder, kind)
        if not (folder / KIND_FILE).exists():
            write_text(folder / KIND_FILE, kind + "\n")
        yield


@contextmanager
def locked_folder(folder: Path, taken: str) -> Iterator[None]:
    """Makes the folder, and holds it inside the block; the lock goes with the process, however it
    ends.

    Raises:
        DataError: With the text `taken`, when another process holds it.
    """
    _refuse_nul(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK_FILE).open("w") as lock:
        if not _lock(lock.fileno(), wait=False):
            raise DataError(taken)
        yield


# ---------------------------------------------------------------------------
# Whole or absent


@contextmanager
def whole_folder(target: Path, *, kind: str) -> Iterator[Path]:
    """Gives an empty sibling folder to fill; when the block ends well, it becomes `target`.

    A run killed half-way leaves `target` as it was, and a hidden `.partial` sibling that the next
    run removes. An earlier folder of the same kind is replaced; anything else is left alone.

    Args:
        target: The folder to make.
        kind: What it is, one of `FOLDER_KINDS`.

    Raises:
        DataError: When `target` is something else, holds files that such a folder was not written
            with, or another process is writing it.
    """
    target = _absolute(target)
    check_replaceable(target, kind=kind)
    partial = target.with_name(f".{target.name}.partial")
    replaced = target.with_name(f".{target.name}.replaced")
    partial.parent.mkdir(parents=True, exist_ok=True)

    lock = _lock_folder(partial, target)
    try:
        # Runs that were killed: one between the two renames below, and those that left something
        # half filled.
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        _remove(replaced)
        _remove_content(partial)

        yield partial

        check_replaceable(target, kind=kind)
        if target.exists():
            target.rename(replaced)
        partial.rename(target)
    except BaseException:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        _remove(replaced)
        os.close(lock)


def check_replaceable(target: Path, *, kind: str) -> None:
    """Raises when writing a folder to `target` would delete something that is not a folder of this
    kind.

    Raises:
        DataError: When `target` is a file, a folder of another kind, or holds files that it was not
            written with.
    """
    check_kind(target, kind)
    if not target.exists():
        return
    if Path.cwd().is_relative_to(os.path.realpath(target)):
        raise DataError(
            f"{target} holds the folder that you are in, which would be replaced. Choose another --out, or change to "
            "another folder."
        )

    entries = {path.name for path in target.iterdir()} - {SUMS_FILE, KIND_FILE, _LOCK_FILE}
    if kind_of(target) is None:
        strange = sorted(entries)
    else:
        written = read_sums(target)
        strange = sorted(entries - {name.split("/")[0] for name in written}) if written else []
        strange = [
            name
            for name in strange
            if not any(fnmatch(name, part) for part in _PARTS.get(kind, ()))
        ]
    if strange:
        raise DataError(
            f"{target} exists and holds something else ({strange[0]!r} is no part of {_a(kind)}), so it is not "
            "overwritten. Choose another folder, or move that away."
        )


def remove_folder(folder: Path) -> None:
    """Removes a folder so that, killed at any moment, it is there whole or not at all under its
    name.

    What a killed process leaves is a hidden `.removed` sibling; see `remove_leftovers`.
    """
    hidden = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def remove_leftovers(folder: Path, pattern: str = "*") -> None:
    """Removes what processes killed in `whole_folder` or `remove_folder` have left below `folder`.

    What was being replaced is put back. Call it only while nobody else writes there.

    Args:
        folder: Holds the folders in question.
        pattern: Of their names, e.g. `step_*`.
    """
    for replaced in folder.glob(f".{pattern}.replaced"):
        target = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))
        if not target.exists():
            replaced.rename(target)
    for ending in ("partial", "replaced", "removed"):
        for leftover in folder.glob(f".{pattern}.{ending}"):
            shutil.rmtree(leftover)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Gives a sibling path to write to; when the block ends well, that file becomes `target`.

    Of two that write the same file at once the second waits for the first.
    """
    _refuse_nul(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    lock = _lock_file(partial)
    try:
        yield partial
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(lock)


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
    """Returns where a command is to write, from what the user gave.

    Args:
        text: The path; of a folder, or with `suffix` of a file.
        suffix: Ending that the file must have, e.g. `.html`, so that no file of another kind is
            overwritten.
        option: What gave it, for the message.
        inputs: Files and folders that are read, which what is written would damage; None for one
            that is not given.

    Raises:
        ConfigError: When it is empty, no possible path, has another ending, or lies in what is read
            or in a folder that is finished.
    """
    if not str(text).strip():
        raise ConfigError(f"{option} is empty; expected a path, e.g. {option} runs/mine{suffix}.")
    if "\0" in str(text):
        raise ConfigError(
            f"{option} is {str(text)!r}; a path cannot hold the character NUL. Choose another name."
        )

    path = Path(text)
    if suffix and path.suffix.lower() != suffix:
        example = path.with_suffix(suffix) if path.name else f"runs/mine{suffix}"
        raise ConfigError(
            f"{option} is {path}; expected a file that ends in {suffix}, e.g. {example}."
        )
    if suffix and path.is_dir():
        raise ConfigError(
            f"{option} {path} is a folder; expected the name of a file. Give e.g. {path / f'report{suffix}'}."
        )

    far_end = Path(os.path.realpath(path))
    if not far_end.name:
        raise ConfigError(
            f"{option} is {path}, the root of all files. Give a folder of its own, e.g. runs/mine."
        )
    for given in inputs:
        if given is None or "\0" in str(given):  # what reads it says so
            continue
        source = Path(os.path.realpath(given))
        if far_end == source or source in far_end.parents:
            place = "is" if far_end == source else "lies in"
            raise ConfigError(
                f"{option} {path} {place} {given}, which is read: one would damage the other. Choose a place beside it."
            )
    for folder in (far_end, *far_end.parents):
        if folder.name == "checkpoints" and kind_of(folder.parent) == "training run":
            raise ConfigError(
                f"{option} {path} lies among the checkpoints of {folder.parent}. Choose a place beside it."
            )
    for folder in far_end.parents:
        if (folder / SUMS_FILE).exists() and kind_of(folder) is not None:
            raise ConfigError(
                f"{option} {path} lies in {folder}, a {kind_of(folder)}. Choose a place beside it."
            )
    return path


# ---------------------------------------------------------------------------
# Inside


def _a(kind: str) -> str:
    """Returns a kind of folder with its article."""
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def _absolute(path: Path) -> Path:
    """Returns a path from the root; a link stays, where `resolve` would write to its far end."""
    return Path(os.path.abspath(path))  # noqa: PTH100


def _remove(path: Path) -> None:
    """Removes a folder, or a link to one, if it can be removed."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _refuse_nul(path: Path) -> None:
    """Raises a ConfigError when a path holds the character NUL, which no file system takes."""
    check(
        "\0" not in str(path),
        "the path",
        str(path),
        "one without the character NUL; choose another name",
    )


def _remove_content(folder: Path) -> None:
    """Removes everything in a folder, and not the folder, which is locked."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _lock_folder(partial: Path, target: Path) -> int:
    """Makes and locks the folder that is being filled, and returns the descriptor that holds the
    lock.

    Raises:
        DataError: When another process has it.
    """
    while True:
        partial.mkdir(exist_ok=True)
        try:
            descriptor = os.open(partial, os.O_RDONLY)
        except FileNotFoundError:  # another process has finished with it in between
            continue
        if not _lock(descriptor, wait=False):
            os.close(descriptor)
            raise DataError(
                f"Another process is writing {target}. Wait for it, or choose another folder."
            )
        if _is_still(descriptor, partial):
            return descriptor
        os.close(descriptor)


def _lock_file(partial: Path) -> int:
    """Makes and locks the file that is being written, and returns the descriptor that holds the
    lock.
    """
    while True:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o666)
        _lock(descriptor, wait=True)
        if _is_still(descriptor, partial):
            return descriptor
        os.close(descriptor)


def _is_still(descriptor: int, path: Path) -> bool:
    """Returns whether an open file or folder is the one that now lies at `path`."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _lock(descriptor: BinaryIO | int, *, wait: bool) -> bool:
    """Locks an open file or folder until it is closed; returns False when another has it and `wait`
    is not set.
    """
    import fcntl  # Unix alone has it, and `import moe` reads this file

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
