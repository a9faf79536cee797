"""The document record, and the documents in the user's own files.

Comes after `prose` and `rows`, before `docstrings`, which reads another source.
"""

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from moe.data.prose import prose_paragraphs
from moe.data.rows import TABLE_SUFFIXES, read_rows, text_of
from moe.errors import DataError
from moe.parsing import read_text

logger = logging.getLogger(__name__)

OWN_LICENCE = "not stated"
MARKUP_SUFFIXES = (".rst",)
"""Endings of files of which only the prose is read."""

SUFFIXES = (".txt", ".md", *MARKUP_SUFFIXES, *TABLE_SUFFIXES)
TEXT_COLUMN = "text"


class Document(NamedTuple):
    """A text that is never divided between training and held-out."""

    text: str
    """Paragraphs, with a blank line between two."""
    source: str
    """File and line, the same on every machine, e.g. "torch/nn/functional.py"; decides the split."""
    package: str
    """Origin of the text: "stdlib", "torch", "numpy", or the name of the user's folder."""
    licence: str


def read_files(paths: Iterable[Path | str], column: str = TEXT_COLUMN) -> list[Document]:
    """Returns the user's own documents.

    A `.txt` or `.md` file is one document with blank lines between paragraphs, a `.rst` file one
    without its markup; each row of a `.jsonl`, `.csv`, `.tsv` or `.parquet` file is one, in the column
    "text". A folder means all such files below it; a warning counts its other files.

    Args:
        paths: Files and folders.
        column: Column of the texts in tables.

    Raises:
        DataError: When a path is missing or of another kind, a file is not UTF-8 text, a row has no
            text, or there is no text at all.
    """
    paths = list(paths)
    documents: list[Document] = []
    for path in paths:
        documents += _read_path(Path(path), column)

    if not documents:
        empty = ", ".join(str(path) for path in paths) or "an empty list of paths"
        raise DataError(
            f"There is no text in {empty}. Give files ending in {', '.join(SUFFIXES)} that are "
            "not empty."
        )
    return documents


def _read_path(path: Path, column: str) -> Iterator[Document]:
    """Yields the documents of a file or folder."""
    if path.is_dir():
        name = path.resolve().name
        for file in files_below(path):
            source = f"{name}/{file.relative_to(path).as_posix()}"
            yield from _read_file(file, column, source=source, package=name)
        return

    # A file must be there, and of a kind that is text.
    endings = ", ".join(SUFFIXES)
    if not path.exists():
        raise DataError(
            f"{printable(str(path))} does not exist. Give a file ending in {endings}, or a folder "
            "of them."
        )
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(
            f"{path} ends in {path.suffix!r}; expected one of {endings}. Convert it first."
        )
    yield from _read_file(path, column, source=path.name, package=path.stem)


def files_below(folder: Path) -> list[Path]:
    """Returns the files of texts and tables below a folder, sorted; warns about its other files."""
    readable: list[Path] = []
    num_others = 0
    other_suffixes: set[str] = set()
    links: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=_refuse_folder):
        for name in names:
            file = Path(parent, name)
            if file.suffix.lower() in SUFFIXES:
                readable.append(file)
            else:
                num_others += 1
                other_suffixes.add(file.suffix)
        links += [Path(parent, name) for name in folders if Path(parent, name).is_symlink()]

    # Say which files are not read.
    if num_others:
        suffixes = [printable(suffix) or "no suffix" for suffix in sorted(other_suffixes)]
        if len(suffixes) > 10:
            suffixes[10:] = ["others"]
        logger.warning(
            "%s: %d files ending in %s are left out.", folder, num_others, ", ".join(suffixes)
        )
    if links:
        example = printable(str(min(links)))
        logger.warning("%s: links to folders are not followed, e.g. %s.", folder, example)
    return sorted(readable)


def _refuse_folder(error: OSError) -> None:
    """Raises for a folder that cannot be read, which `os.walk` would pass over."""
    raise DataError(
        f"{error.filename} cannot be read: {error.strerror}. Make it readable, or leave it out."
    ) from error


def _read_file(path: Path, column: str, *, source: str, package: str) -> Iterator[Document]:
    """Yields the documents of one file."""
    source = printable(source)
    package = printable(package)

    # Tables: a document each row.
    if path.suffix.lower() in TABLE_SUFFIXES:
        advice = f"Expected a text in the column {column!r} of each row."
        for where, row in read_rows(path, advice=advice, columns=[column]):
            _, _, number = where.rpartition(" ")  # of the line or row
            content = join_lines(text_of(row, column, where=where, advice=advice))
            if content:
                yield Document(content, f"{source}:{number}", package, OWN_LICENCE)
        return

    # Plain text: one document.
    content = read_document(path)
    if content:
        yield Document(content, source, package, OWN_LICENCE)


def read_document(path: Path) -> str:
    """Returns the text of a `.txt`, `.md` or `.rst` file, with a blank line between paragraphs.

    Raises:
        DataError: When it is not UTF-8 text.
    """
    text = read_text(path, advice="Make it a readable file, or leave it out.")
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise DataError(
            f"{path} holds the character NUL in line {line}: it is binary or UTF-16. Leave it out, "
            f"or convert it, e.g. `iconv -f utf-16 -t utf-8 {path.name}`."
        )
    is_markup = path.suffix.lower() in MARKUP_SUFFIXES
    return "\n\n".join(prose_paragraphs(text)) if is_markup else join_lines(text)


def printable(name: str) -> str:
    """Returns the name of a file with its unprintable characters escaped."""
    characters = []
    for character in name:
        characters.append(character if character.isprintable() else repr(character)[1:-1])
    return "".join(characters)


def join_lines(text: str) -> str:
    """Returns the paragraphs of a text, each on one line, with a blank line between two."""
    # A line of spaces is blank.
    lines = [line.strip() for line in text.splitlines()]
    paragraphs = []
    for block in "\n".join(lines).split("\n\n"):
        paragraph = " ".join(block.split())
        if paragraph:
            paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)
