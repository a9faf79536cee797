"""The corpus: documents without repetitions, divided into training and held-out, kept on disk.

Comes after `documents`, before `tokenizer` and `pipeline`.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moe.checks import check_integer, check_number, shown
from moe.checksums import read_sums, refuse_damage, write_sums
from moe.data.documents import Document
from moe.errors import DataError
from moe.files import register_folder_kind, whole_folder
from moe.parsing import read_json, reading

if TYPE_CHECKING:
    import datasets

FACTS_FILE = "corpus.json"
SPLITS = ("train", "held_out")
CORPUS = register_folder_kind("corpus", markers=[FACTS_FILE], parts=[FACTS_FILE, *SPLITS])


class Corpus(NamedTuple):
    """Two data sets with the columns of `Document`, and the number of omitted paragraphs."""

    train: "datasets.Dataset"
    held_out: "datasets.Dataset"
    num_repeated: int
    """Paragraphs left out because an earlier one has the same words."""


def build_corpus(
    documents: Iterable[Document], held_out_fraction: float = 0.05, seed: int = 0
) -> Corpus:
    """Returns the documents without repeated paragraphs, divided into training and held-out.

    The split of a document depends on `seed` and its source alone, so adding a document later does
    not move any other. Only if one split would be empty, the document nearest to the threshold
    changes splits.

    Args:
        documents: Documents in any order; of equal paragraphs the first stays. All documents of one
            source count as one document. If there is only one, its paragraphs are the documents.
        held_out_fraction: Expected share of documents held out, between 0 and 1.
        seed: Another seed holds out other documents.

    Raises:
        ConfigError: When the fraction is not between 0 and 1.
        DataError: When fewer than two documents have text.
    """
    import datasets

    check_number("held_out_fraction", held_out_fraction, above=0, below=1)
    check_integer("seed", seed)
    documents = list(documents)
    if len(documents) == 1:
        (whole,) = documents
        documents = []
        for number, paragraph in enumerate(whole.text.split("\n\n"), start=1):
            documents.append(whole._replace(text=paragraph, source=f"{whole.source}:{number}"))
    kept, num_repeated = drop_repeated_paragraphs(documents)

    # A source is held out when its number, drawn from (seed, source), is below the threshold. Each
    # side has at least one source.
    numbers = {document.source: _split_number(document.source, seed) for document in kept}
    if len(numbers) < 2:
        raise DataError(
            f"The corpus has {len(numbers)} document(s) with text; expected at least 2, because "
            "whole documents are held out. Separate the paragraphs of the text by blank lines, or "
            "divide it into several files."
        )
    ascending = sorted(numbers.values())
    border = min(max(held_out_fraction, ascending[0]), ascending[-2])

    rows = datasets.Dataset.from_list([document._asdict() for document in kept])
    is_held_out = np.array([numbers[source] <= border for source in rows["source"]])
    train = rows.select(np.flatnonzero(~is_held_out))
    return Corpus(train, rows.select(np.flatnonzero(is_held_out)), num_repeated)


def _split_number(source: str, seed: int) -> float:
    """Returns a number in [0, 1) that looks random and is the same on every machine."""
    digest = hashlib.sha256(f"{seed}:{source}".encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48


def drop_repeated_paragraphs(documents: Iterable[Document]) -> tuple[list[Document], int]:
    """Returns the documents without repeated paragraphs, and the number of those.

    Two paragraphs are equal when they have the same letters and digits, ignoring case, spaces and
    punctuation. Empty documents are dropped.
    """
    seen: set[str] = set()
    kept: list[Document] = []
    num_repeated = 0
    for document in documents:
        paragraphs = []

        # Letters and digits alone, or the paragraph itself where it has none.
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


def save_corpus(corpus: Corpus, folder: Path | str) -> None:
    """Writes the corpus and its checksums to `folder`, whole or not at all.

    An earlier corpus there is replaced.

    Raises:
        DataError: When the folder holds something that is not a corpus.
    """
    with whole_folder(Path(folder), kind=CORPUS) as partial:
        for split in SPLITS:
            getattr(corpus, split).save_to_disk(str(partial / split))

        facts = {"num_repeated": corpus.num_repeated}
        (partial / FACTS_FILE).write_text(json.dumps(facts) + "\n", encoding="utf-8")
        write_sums(partial)


def is_corpus(folder: Path) -> bool:
    """Returns whether `save_corpus` wrote the folder."""
    return (folder / FACTS_FILE).is_file()


def load_corpus(folder: Path | str) -> Corpus:
    """Returns a corpus that `save_corpus` wrote; the texts stay on disk until they are read.

    Every byte is compared with its checksum once, at the speed of the disk.

    Raises:
        DataError: When the folder is not a corpus, or a file of it is damaged; names the file.
    """
    folder = Path(folder)
    advice = f"Make the corpus again: `stmoe corpus --data FILES --out {folder}`."
    if not is_corpus(folder):
        raise DataError(
            f"{folder} is not a corpus: it has no {FACTS_FILE}. "
            f"Make one with `stmoe corpus --data FILES --out {folder}`."
        )

    # Every file is there and unchanged.
    refuse_damage(folder, {FACTS_FILE, *(read_sums(folder) or ())}, advice=advice)
    facts = folder / FACTS_FILE
    with reading(facts, advice=advice):
        num_repeated = int(read_json(facts, advice=advice)["num_repeated"])
    train, held_out = (_read_split(folder / split, advice) for split in SPLITS)
    return Corpus(train, held_out, num_repeated)


def _read_split(folder: Path, advice: str) -> "datasets.Dataset":
    """Returns the rows of a split.

    Raises:
        DataError: When it is no data set of documents.
    """
    import datasets

    with reading(folder, problem="is damaged", advice=advice):
        split = datasets.Dataset.load_from_disk(str(folder))
        split.data.table.validate(full=True)  # an invalid offset would crash the process
        columns = {name: datasets.Value("string") for name in Document._fields}
        if dict(split.features) != columns:
            raise ValueError(f"it has the columns {shown(dict(split.features))}")
    return split


CORPUS_HEADER = [
    "package",
    "licence",
    "train documents",
    "held-out documents",
    "train characters",
    "held-out characters",
]


def corpus_rows(corpus: Corpus) -> list[list[str | int]]:
    """Returns documents and characters by package under CORPUS_HEADER, with licences and a total."""
    counts = defaultdict(lambda: np.zeros(4, dtype=np.int64))
    for number, split in enumerate((corpus.train, corpus.held_out)):
        columns = split["package"], split["licence"], split["text"]
        for package, licence, text in zip(*columns, strict=True):
            counts[package, licence][number::2] += (1, len(text))

    rows = [[*origin, *counts[origin].tolist()] for origin in sorted(counts)]
    totals = np.sum(list(counts.values()), axis=0)
    return [*rows, ["total", "", *totals.tolist()]]
