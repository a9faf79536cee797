"""The document record, and the documents in the user's own files.

Comes after `rows`, before `corpus`.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from moe.data.folders import SUFFIXES, TABLE_SUFFIXES, files_of, parse_folder
from moe.data.rows import read_rows, text_of
from moe.errors import DataError
from moe.parsing import printable, read_text, suffix_of

OWN_LICENCE = "not stated"
TEXT_COLUMN = "text"


class Document(NamedTuple):
    """A text that is never divided between training and held-out.

    Attributes:
        text: Paragraphs, with a blank line between two.
        source: File and line, the same on every machine, e.g. "books/emma.txt"; decides the split.
        package: Origin of the text: the name of the user's file or folder.
        licence: Licence of the text.
    """

    text: str
    source: str
    package: str
    licence: str


def read_files(paths: Iterable[Path | str], column: str = TEXT_COLUMN) -> list[Document]:
    """Returns the user's own documents.

    A `.txt`, `.md` or `.rst` file is one document with blank lines between paragraphs; each row of a
    `.jsonl`, `.csv`, `.tsv` or `.parquet` file is one, in the column "text". A folder means all such
    files below it; a warning counts its other files.

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
    folder = parse_folder(path)
    if folder is not None:
        name = folder.path.resolve().name
        for file in files_of(path):
            source = f"{name}/{file.relative_to(folder.path).as_posix()}"
            yield from _read_file(file, column, source=source, package=name)
        return

    # A file must be there, and of a kind that is text.
    endings = ", ".join(SUFFIXES)
    if not path.exists():
        raise DataError(
            f"{printable(str(path))} does not exist. Give a file ending in {endings}, or a folder "
            "of them."
        )
    if suffix_of(path) not in SUFFIXES:
        raise DataError(
            f"{path} ends in {path.suffix!r}; expected one of {endings}. Convert it first."
        )
    yield from _read_file(path, column, source=path.name, package=path.stem)


def _read_file(path: Path, column: str, *, source: str, package: str) -> Iterator[Document]:
    """Yields the documents of one file."""
    # Names whose bytes are not UTF-8 cannot be written.
    source = printable(source)
    package = printable(package)

    # Tables: a document each row.
    if suffix_of(path) in TABLE_SUFFIXES:
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
        raise DataError(f"{path} holds the character NUL: it is not text. Leave it out.")
    return join_lines(text)


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
