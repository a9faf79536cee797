"""Files of a source: one file, or those of a folder, of one split where the folder has splits.

Comes before `rows`, `documents` and `blocks`, which read them.
"""

import logging
import os
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from moe.errors import DataError
from moe.parsing import printable, suffix_of

logger = logging.getLogger(__name__)

SEPARATORS = {".csv": ",", ".tsv": "\t"}
PARQUET = ".parquet"
TABLE_SUFFIXES = (".jsonl", *SEPARATORS, PARQUET)
SUFFIXES = (".txt", ".md", ".rst", *TABLE_SUFFIXES)

_TRAIN = "train"
_NO_SPLITS = {_TRAIN: ["**"]}  # as `datasets` describes a folder whose names tell nothing
_SPLIT_WORD = re.compile("train|val|dev|test|eval|-of-")  # part of every name of a split's files
_TEXTS = (".txt", *TABLE_SUFFIXES)
_CARD = "README.md"
_SAVED = ("dataset_info.json", "dataset_dict.json")  # written by `Dataset.save_to_disk`


class Folder(NamedTuple):
    """A folder, and the names after it in `FOLDER:SPLIT` or `FOLDER:CONFIG:SPLIT`."""

    path: Path
    config: str | None
    split: str | None

    @property
    def is_saved(self) -> bool:
        """Whether it is a dataset that `datasets` saved, not a folder of files."""
        return any((self.path / name).exists() for name in _SAVED)


def parse_folder(source: Path) -> Folder | None:
    """Returns the parts of `FOLDER`, `FOLDER:SPLIT` or `FOLDER:CONFIG:SPLIT`; None if there is no such folder."""
    path = str(source)
    names: list[str | None] = []
    while ":" in path and len(names) < 2 and not Path(path).exists():
        path, _, name = path.rpartition(":")
        names.insert(0, name)
    config, split = [None, None, *names][-2:]
    return Folder(Path(path), config, split) if Path(path).is_dir() else None


def files_of(source: Path) -> list[Path]:
    """Returns a file, or the files of texts and tables below a folder, sorted.

    A folder in a layout of `datasets`, such as a dataset downloaded from the hub, has splits: only the files
    of the split in `FOLDER:SPLIT` are read, or else those of `train`.

    Raises:
        DataError: When a split does not exist, or has to be named.
    """
    folder = parse_folder(source)
    if folder is None:
        return [source]
    files = files_below(folder.path)
    splits = _files_by_split(folder, files) or {_TRAIN: files}

    # A single split needs no name.
    names = ", ".join(splits)
    split = folder.split or (names if len(splits) == 1 else _TRAIN)
    if split not in splits:
        raise DataError(
            f"{folder.path} has no split {split!r}; its splits: {names}. Name one of them as FOLDER:SPLIT."
        )
    if folder.split is None and len(splits) > 1:
        logger.warning("%s: of its splits %s only %s is read.", folder.path, names, split)
    return sorted(splits[split])


def _files_by_split(folder: Folder, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Returns the files of each split, as `datasets` finds them; empty for a folder without splits."""
    tables = {file for file in files if suffix_of(file) in TABLE_SUFFIXES}
    pages = {file for file in files if file not in tables and file.name != _CARD}
    path = folder.path.resolve()
    card = path / _CARD
    header = card.read_bytes().partition(b"\n---")[0] if card.is_file() else b""
    has_configs = header.startswith(b"---") and b"\nconfigs:" in header

    # `datasets` takes seconds to import, and milliseconds for each file.
    texts = [
        file.relative_to(folder.path).as_posix() for file in files if suffix_of(file) in _TEXTS
    ]
    if not has_configs and not any(map(_SPLIT_WORD.search, texts)):
        return {}

    import datasets
    from datasets.data_files import get_data_patterns

    splits: dict[str, list[Path]] = {}
    try:
        with TemporaryDirectory() as cache:
            builder = datasets.load_dataset_builder(str(path), folder.config, cache_dir=cache)
        for split, names in (builder.config.data_files or {}).items():
            splits[str(split)] = [folder.path / Path(name).relative_to(path) for name in names]
        split_files = set(chain.from_iterable(splits.values()))
        if not split_files <= set(files):
            raise DataError(f"{min(split_files - set(files))} is no text or table below it")
        if not has_configs and len(splits) == 1 and get_data_patterns(str(path)) == _NO_SPLITS:
            return {}
    except Exception as error:  # whatever a card's YAML makes `datasets` raise
        if len(pages) > len(tables) and not has_configs and folder.split is None:
            return {}
        reason = " ".join(str(error).split())
        raise DataError(
            f"{folder.path} cannot be read as a dataset: {reason}. Name FOLDER:SPLIT, FOLDER:CONFIG:SPLIT or a file."
        ) from error

    # Pages such as testing.md are no split of the other pages.
    return {} if split_files & pages and not pages <= split_files else splits


def files_below(folder: Path) -> list[Path]:
    """Returns the files of texts and tables below a folder, sorted; warns about its other files."""
    readable: list[Path] = []
    others: list[Path] = []
    links: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=_refuse_folder):
        for name in names:
            file = Path(parent, name)
            (readable if suffix_of(file) in SUFFIXES else others).append(file)
        links += [Path(parent, name) for name in folders if Path(parent, name).is_symlink()]

    # Say which files are not read.
    if others:
        suffixes = sorted({printable(file.suffix) or "no suffix" for file in others})
        listed = ", ".join(suffixes)
        logger.warning("%s: %d files ending in %s are left out.", folder, len(others), listed)
    if links:
        example = printable(str(min(links)))
        logger.warning("%s: links to folders are not followed, e.g. %s.", folder, example)
    return sorted(readable)


def _refuse_folder(error: OSError) -> None:
    """Raises for a folder that cannot be read, which `os.walk` would pass over."""
    raise DataError(
        f"{error.filename} cannot be read: {error.strerror}. Make it readable, or leave it out."
    ) from error
