"""The corpus: documents without repetitions, divided into training and held-out, kept on disk.

Comes after `documents`, before `tokenizer` and `pipeline`.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import datasets
import pyarrow
from pydantic import Field

from moe.checks import check_integer, check_number, shown
from moe.checksums import refuse_damage, write_sums
from moe.data.documents import Document
from moe.errors import ConfigError, DataError
from moe.files import whole_folder
from moe.parsing import read_record

FACTS_FILE = "corpus.json"
SPLITS = ("train", "held_out")
_SHARD = re.compile(r"data-(\d{5})-of-(\d{5})\.arrow")


class Corpus(NamedTuple):
    """Two data sets with the columns of `Document`, and what was left out of them."""

    train: datasets.Dataset
    held_out: datasets.Dataset
    num_repeated: int
    """Paragraphs left out because an earlier one has the same words."""


class _Facts(NamedTuple):
    """What `FACTS_FILE` holds."""

    num_repeated: Annotated[int, Field(ge=0)]


def build_corpus(
    documents: Iterable[Document],
    held_out_fraction: float = 0.05,
    seed: int = 0,
    leave_out: Collection[str] = (),
) -> Corpus:
    """Returns the documents without repeated paragraphs, divided into training and held-out.

    A document's side depends on `seed` and its source alone, so a document added later moves no
    other; only where that leaves one side empty does the document nearest to the border change
    sides.

    Args:
        documents: In any order; of equal paragraphs the first stays. Those of one source count as
            one document.
        held_out_fraction: Expected share of documents held out, between 0 and 1.
        seed: Another seed holds out other documents.
        leave_out: Sources of documents that are to be unseen: neither they nor paragraphs that they
            hold are in it.

    Raises:
        ConfigError: When the fraction is not between 0 and 1, or a source to leave out is not
            there.
        DataError: When fewer than two documents have text, or a text is none that UTF-8 can write.
    """
    check_number("held_out_fraction", held_out_fraction, above=0, below=1)
    check_integer("seed", seed)
    documents = sorted(
        documents, key=lambda document: document.source not in leave_out
    )  # the first of equals stays
    if missing := sorted(set(leave_out) - {document.source for document in documents}):
        raise ConfigError(
            f"{missing[0]!r} is to be left out, but is no source of the documents. Leave it away."
        )
    _refuse_half_characters(documents)
    kept, num_repeated = drop_repeated_paragraphs(documents)
    kept = [document for document in kept if document.source not in leave_out]
    places = {document.source: _place_in_split(document.source, seed) for document in kept}
    if len(places) < 2:
        raise DataError(
            f"The corpus has {len(places)} document(s) with text; expected at least 2, because whole documents are "
            "held out. Divide the text into several files, or into lines of a .jsonl file."
        )
    border = min(max(held_out_fraction, min(places.values())), sorted(places.values())[-2])
    train = [document for document in kept if places[document.source] > border]
    held_out = [document for document in kept if places[document.source] <= border]
    return Corpus(_to_dataset(train), _to_dataset(held_out), num_repeated)


def _refuse_half_characters(documents: Iterable[Document]) -> None:
    """Raises a DataError for a document with half of a surrogate pair, which no file can hold."""
    for document in documents:
        for name, text in zip(document._fields, document, strict=True):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                found = shown(text[error.start : error.end])
                raise DataError(
                    f"The {name} of the document {shown(document.source)} holds half a character, {found} at position "
                    f"{error.start:,}. Repair the text, e.g. text.encode(errors='replace').decode()."
                ) from error


def _place_in_split(source: str, seed: int) -> float:
    """Returns a number in [0, 1) that looks random and is the same on every machine."""
    digest = hashlib.sha256(f"{seed}:{source}".encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48


def drop_repeated_paragraphs(documents: Iterable[Document]) -> tuple[list[Document], int]:
    """Returns the documents without paragraphs that occurred before, and how many paragraphs that
    were.

    Two paragraphs are equal when they have the same letters and digits, whatever the case, spaces
    and punctuation: otherwise inherited docstrings would stand in training and held-out alike. A
    document left empty is dropped.
    """
    seen: set[str] = set()
    kept: list[Document] = []
    num_repeated = 0
    for document in documents:
        paragraphs = []
        for paragraph in filter(None, document.text.split("\n\n")):
            key = "".join(filter(str.isalnum, paragraph.casefold())) or paragraph
            if key in seen:
                num_repeated += 1
            else:
                seen.add(key)
                paragraphs.append(paragraph)
        if paragraphs:
            kept.append(document._replace(text="\n\n".join(paragraphs)))
    return kept, num_repeated


def _to_dataset(documents: list[Document]) -> datasets.Dataset:
    """Returns the documents as rows."""
    columns = zip(*documents, strict=True)
    return datasets.Dataset.from_dict(
        {name: list(column) for name, column in zip(Document._fields, columns, strict=True)}
    )


def save_corpus(corpus: Corpus, folder: Path | str) -> None:
    """Writes the corpus and its checksums to `folder`, whole or not at all; an earlier corpus there
    is replaced.

    Raises:
        DataError: When the folder holds something that is not a corpus.
    """
    with whole_folder(Path(folder), kind="corpus") as partial, _no_progress_bars():
        for split in SPLITS:
            getattr(corpus, split).save_to_disk(str(partial / split))
        (partial / FACTS_FILE).write_text(
            json.dumps({"num_repeated": corpus.num_repeated}) + "\n", encoding="utf-8"
        )
        write_sums(partial)


def load_corpus(folder: Path | str) -> Corpus:
    """Returns a corpus that `save_corpus` wrote; the texts stay on disk until they are read.

    Every byte is compared with its checksum once, at the speed of the disk.

    Raises:
        DataError: When the folder is not a corpus, or a file of it is damaged; names the file.
    """
    folder = Path(folder)
    advice = f"Make the corpus again: `python -m scripts.build_corpus --out {folder}`."
    if not (folder / FACTS_FILE).is_file():
        raise DataError(
            f"{folder} is not a corpus: it has no {FACTS_FILE}. "
            f"Make one with `python -m scripts.build_corpus --out {folder}`."
        )

    shards = {split: _shards(folder / split, advice) for split in SPLITS}
    names = [f"{split}/{path.name}" for split in SPLITS for path in shards[split]]
    has_sums = refuse_damage(folder, [FACTS_FILE, *names], advice=advice)
    facts = read_record(folder / FACTS_FILE, _Facts, advice=advice)

    train = _read_split(shards["train"], advice, validate=not has_sums)
    held_out = _read_split(shards["held_out"], advice, validate=not has_sums)
    return Corpus(train, held_out, facts.num_repeated)


def _shards(folder: Path, advice: str) -> list[Path]:
    """Returns the files of a split, in order.

    Raises:
        DataError: When one is missing.
    """
    shards = sorted(path for path in folder.glob("data-*.arrow") if _SHARD.fullmatch(path.name))
    num_shards = int(shards[0].stem.rpartition("-")[2]) if shards else 1
    for number in range(num_shards):
        path = folder / f"data-{number:05}-of-{num_shards:05}.arrow"
        if path not in shards:
            raise DataError(f"{path} is missing. {advice}")
    return shards


def _read_split(shards: list[Path], advice: str, *, validate: bool) -> datasets.Dataset:
    """Returns the rows of a split.

    Args:
        shards: Its files.
        advice: What the user can do when one is damaged.
        validate: Whether to look at every row: an offset that points nowhere would end the process.

    Raises:
        DataError: When a file is no Arrow stream of documents.
    """
    parts = []
    for path in shards:
        try:
            part = datasets.Dataset.from_file(str(path))
            if validate:
                part.data.table.validate(full=True)
        except (
            pyarrow.ArrowException,
            OSError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
        ) as error:
            raise DataError(f"{path} is damaged: {str(error).strip()}. {advice}") from error

        columns = {name: datasets.Value("string") for name in Document._fields}
        if dict(part.features) != columns:
            raise DataError(
                f"{path} has the columns {shown(dict(part.features))}; expected those of documents. {advice}"
            )
        parts.append(part)
    return datasets.concatenate_datasets(parts)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keeps the bars of `datasets` off the terminal for a while: writing a few megabytes needs
    none.
    """
    were_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            datasets.enable_progress_bars()


def corpus_table(corpus: Corpus) -> str:
    """Returns a Markdown table: documents and characters by package, each with its licence, and the
    total.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    for split in SPLITS:
        data: datasets.Dataset = getattr(corpus, split)
        for package, licence, text in zip(
            data["package"], data["licence"], data["text"], strict=True
        ):
            counts[package, licence, f"{split} documents"] += 1
            counts[package, licence, f"{split} characters"] += len(text)
    columns = [f"{split} {unit}" for unit in ("documents", "characters") for split in SPLITS]
    owners = sorted({(package, licence) for package, licence, _ in counts})
    rows = [[*owner, *(counts[*owner, column] for column in columns)] for owner in owners]
    rows.append(
        ["total", "", *(sum(counts[*owner, column] for owner in owners) for column in columns)]
    )
    return _markdown_table(
        ["package", "licence", *(column.replace("_", "-") for column in columns)], rows
    )


def _markdown_table(header: list[str], rows: list[list[str | int]]) -> str:
    """Returns an aligned table; numbers stand right, with thousands separators."""
    cells = [
        header,
        *(
            [f"{cell:,}" if isinstance(cell, int) else cell.replace("|", "\\|") for cell in row]
            for row in rows
        ),
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    numeric = [isinstance(cell, int) for cell in rows[0]]
    lines = [
        "| "
        + " | ".join(
            c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)
        )
        + " |"
        for row in cells
    ]
    rule = (
        "|"
        + "|".join(
            "-" * (w + 1) + (":" if n else "-") for w, n in zip(widths, numeric, strict=True)
        )
        + "|"
    )
    return "\n".join([lines[0], rule, *lines[1:]])
