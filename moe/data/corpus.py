"""The corpus: documents without repetitions, divided into training and held-out, kept on disk.

Comes after `documents`, before `tokenizer` and `pipeline`.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import datasets

from moe.data.documents import Document
from moe.errors import ConfigError, DataError
from moe.files import whole_folder

FACTS_FILE = "corpus.json"
SPLITS = ("train", "held_out")


class Corpus(NamedTuple):
    """Two data sets with the columns of `Document`, and what was left out of them."""

    train: datasets.Dataset
    held_out: datasets.Dataset
    num_repeated: int
    """Paragraphs left out because an earlier one has the same words."""


def build_corpus(
    documents: Iterable[Document],
    held_out_fraction: float = 0.05,
    seed: int = 0,
    leave_out: Collection[str] = (),
) -> Corpus:
    """Returns the documents without repeated paragraphs, divided into training and held-out.

    A document's side depends on `seed` and its source alone, so a document added later moves no other; only where that
    leaves one side empty does the document nearest to the border change sides.

    Args:
        documents: In any order; of equal paragraphs the first stays. Those of one source count as one document.
        held_out_fraction: Expected share of documents held out, between 0 and 1.
        seed: Another seed holds out other documents.
        leave_out: Sources of documents that are to be unseen: neither they nor paragraphs that they hold are in it.

    Raises:
        ConfigError: When the fraction is not between 0 and 1, or a source to leave out is not there.
        DataError: When fewer than two documents have text.
    """
    if not 0 < held_out_fraction < 1:
        raise ConfigError(f"held_out_fraction is {held_out_fraction}; expected a number between 0 and 1, e.g. 0.05.")
    documents = sorted(documents, key=lambda document: document.source not in leave_out)  # the first of equals stays
    if missing := sorted(set(leave_out) - {document.source for document in documents}):
        raise ConfigError(f"{missing[0]!r} is to be left out, but is no source of the documents. Leave it away.")
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


def _place_in_split(source: str, seed: int) -> float:
    """Returns a number in [0, 1) that looks random and is the same on every machine."""
    digest = hashlib.sha256(f"{seed}:{source}".encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48


def drop_repeated_paragraphs(documents: Iterable[Document]) -> tuple[list[Document], int]:
    """Returns the documents without paragraphs that occurred before, and how many paragraphs that were.

    Two paragraphs are equal when they have the same letters and digits, whatever the case, spaces and punctuation:
    otherwise inherited docstrings would stand in training and held-out alike. A document left empty is dropped.
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
    """Writes the corpus to `folder`, whole or not at all; an earlier corpus there is replaced.

    Raises:
        DataError: When the folder holds something that is not a corpus.
    """
    with whole_folder(Path(folder), kind="corpus") as partial, _no_progress_bars():
        for split in SPLITS:
            getattr(corpus, split).save_to_disk(str(partial / split))
        (partial / FACTS_FILE).write_text(json.dumps({"num_repeated": corpus.num_repeated}) + "\n", encoding="utf-8")


def load_corpus(folder: Path | str) -> Corpus:
    """Returns a corpus that `save_corpus` wrote; the texts stay on disk until they are read.

    Raises:
        DataError: When the folder is not a corpus.
    """
    folder = Path(folder)
    if not (folder / FACTS_FILE).is_file():
        raise DataError(
            f"{folder} is not a corpus: it has no {FACTS_FILE}. "
            f"Make one with `python -m scripts.build_corpus --out {folder}`."
        )
    facts = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
    train, held_out = (datasets.Dataset.load_from_disk(str(folder / split)) for split in SPLITS)
    return Corpus(train, held_out, facts["num_repeated"])


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keeps the bars of `datasets` off the terminal for a while: writing a few megabytes needs none."""
    were_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            datasets.enable_progress_bars()


def corpus_table(corpus: Corpus) -> str:
    """Returns a Markdown table: documents and characters by package, each with its licence, and the total."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for split in SPLITS:
        data: datasets.Dataset = getattr(corpus, split)
        for package, licence, text in zip(data["package"], data["licence"], data["text"], strict=True):
            counts[package, licence, f"{split} documents"] += 1
            counts[package, licence, f"{split} characters"] += len(text)
    columns = [f"{split} {unit}" for unit in ("documents", "characters") for split in SPLITS]
    owners = sorted({(package, licence) for package, licence, _ in counts})
    rows = [[*owner, *(counts[*owner, column] for column in columns)] for owner in owners]
    rows.append(["total", "", *(sum(counts[*owner, column] for owner in owners) for column in columns)])
    return _markdown_table(["package", "licence", *(column.replace("_", "-") for column in columns)], rows)


def _markdown_table(header: list[str], rows: list[list[str | int]]) -> str:
    """Returns an aligned table; numbers stand right, with thousands separators."""
    cells = [header, *([f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    numeric = [isinstance(cell, int) for cell in rows[0]]
    lines = [
        "| " + " | ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)) + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (w + 1) + (":" if n else "-") for w, n in zip(widths, numeric, strict=True)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
