"""The corpus: documents without repetitions, divided into training and held-out, kept on disk.

Comes after `documents`, before `tokenizer` and `pipeline`.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import pyarrow
from pydantic import BaseModel, Field

from moe.checks import check_integer, check_number, shown
from moe.checksums import refuse_damage, write_sums
from moe.data.documents import Document
from moe.errors import DataError
from moe.files import register_folder_kind, whole_folder
from moe.parsing import read_record

if TYPE_CHECKING:
    import datasets

FACTS_FILE = "corpus.json"
SPLITS = ("train", "held_out")
CORPUS = register_folder_kind("corpus", markers=[FACTS_FILE], parts=[FACTS_FILE, *SPLITS])
_SHARD = re.compile(r"data-(\d{5})-of-(\d{5})\.arrow")


class Corpus(NamedTuple):
    """Two data sets with the columns of `Document`, and the number of omitted paragraphs."""

    train: "datasets.Dataset"
    held_out: "datasets.Dataset"
    num_repeated: int
    """Paragraphs left out because an earlier one has the same words."""


class _Facts(BaseModel, frozen=True):
    """Content of `FACTS_FILE`."""

    num_repeated: Annotated[int, Field(ge=0)]


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
        DataError: When fewer than two documents have text, or a text cannot be written as UTF-8.
    """
    check_number("held_out_fraction", held_out_fraction, above=0, below=1)
    check_integer("seed", seed)
    documents = list(documents)
    if len(documents) == 1:
        documents = _paragraph_documents(documents[0])
    kept, num_repeated = drop_repeated_paragraphs(documents)

    # A source is held out when its number, drawn from (seed, source), is below the threshold. Each
    # side has at least one source.
    try:
        numbers = {document.source: _split_number(document.source, seed) for document in kept}
        for document in kept:
            document.text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"A document holds half of a surrogate pair, {error.object[error.start]!r}. Repair the text, e.g. "
            "text.encode(errors='replace').decode()."
        ) from error
    if len(numbers) < 2:
        raise DataError(
            f"The corpus has {len(numbers)} document(s) with text; expected at least 2, because "
            "whole documents are held out. Separate the paragraphs of the text by blank lines, or "
            "divide it into several files."
        )
    ascending = sorted(numbers.values())
    border = min(max(held_out_fraction, ascending[0]), ascending[-2])

    train = [document for document in kept if numbers[document.source] > border]
    held_out = [document for document in kept if numbers[document.source] <= border]
    return Corpus(_to_dataset(train), _to_dataset(held_out), num_repeated)


def _paragraph_documents(document: Document) -> list[Document]:
    documents = []
    for number, paragraph in enumerate(document.text.split("\n\n"), start=1):
        documents.append(document._replace(text=paragraph, source=f"{document.source}:{number}"))
    return documents


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


def _to_dataset(documents: list[Document]) -> "datasets.Dataset":
    import datasets

    columns = {}
    for name in Document._fields:
        columns[name] = [getattr(document, name) for document in documents]
    return datasets.Dataset.from_dict(columns)


def save_corpus(corpus: Corpus, folder: Path | str) -> None:
    """Writes the corpus and its checksums to `folder`, whole or not at all.

    An earlier corpus there is replaced.

    Raises:
        DataError: When the folder holds something that is not a corpus.
    """
    with whole_folder(Path(folder), kind=CORPUS) as partial, _no_progress_bars():
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

    # Every file exists and is unchanged.
    train_shards = _find_shards(folder / "train", advice)
    held_out_shards = _find_shards(folder / "held_out", advice)
    names = [FACTS_FILE]
    for path in (*train_shards, *held_out_shards):
        names.append(path.relative_to(folder).as_posix())
    has_sums = refuse_damage(folder, names, advice=advice)

    facts = read_record(folder / FACTS_FILE, _Facts, advice=advice)
    train = _read_split(train_shards, advice, validate=not has_sums)
    held_out = _read_split(held_out_shards, advice, validate=not has_sums)
    return Corpus(train, held_out, facts.num_repeated)


def _find_shards(folder: Path, advice: str) -> list[Path]:
    """Returns the files of a split, in order.

    Raises:
        DataError: When one is missing.
    """
    shards = sorted(path for path in folder.glob("data-*.arrow") if _SHARD.fullmatch(path.name))

    # The name of each says how many there are.
    num_shards = int(shards[0].stem.rpartition("-")[2]) if shards else 1
    for number in range(num_shards):
        path = folder / f"data-{number:05}-of-{num_shards:05}.arrow"
        if path not in shards:
            raise DataError(f"{path} is missing. {advice}")
    return shards


def _read_split(shards: list[Path], advice: str, *, validate: bool) -> "datasets.Dataset":
    """Returns the rows of a split.

    Args:
        shards: Files of the split.
        advice: Advice for the user if one is damaged.
        validate: Whether to check every row: an invalid offset would crash the process.

    Raises:
        DataError: When a file is not an Arrow stream of documents.
    """
    import datasets

    columns = {name: datasets.Value("string") for name in Document._fields}
    parts = []
    for path in shards:
        try:
            part = datasets.Dataset.from_file(str(path))
            if validate:
                part.data.table.validate(full=True)
        except _DAMAGE as error:
            raise DataError(f"{path} is damaged: {str(error).strip()}. {advice}") from error

        # An Arrow file with other content.
        if dict(part.features) != columns:
            raise DataError(
                f"{path} has the columns {shown(dict(part.features))}; expected those of "
                f"documents. {advice}"
            )
        parts.append(part)
    return datasets.concatenate_datasets(parts)


_DAMAGE = (pyarrow.ArrowException, OSError, ValueError, TypeError, KeyError, AttributeError)
"""Errors of `datasets` and pyarrow for a file that is not an Arrow stream of a data set."""


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keeps the bars of `datasets` off the terminal: writing a few megabytes needs none."""
    import datasets

    were_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            datasets.enable_progress_bars()


CORPUS_HEADER = [
    "package",
    "licence",
    "train documents",
    "held-out documents",
    "train characters",
    "held-out characters",
]
_TABLE_COLUMNS = (
    "train_documents",
    "held_out_documents",
    "train_characters",
    "held_out_characters",
)


def corpus_table(corpus: Corpus) -> str:
    """Returns `corpus_rows` as a Markdown table."""
    return markdown_table(CORPUS_HEADER, corpus_rows(corpus))


def corpus_rows(corpus: Corpus) -> list[list[str | int]]:
    """Returns documents and characters by package under CORPUS_HEADER, with licences and a total."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for split in SPLITS:
        data: datasets.Dataset = getattr(corpus, split)
        for row in zip(data["package"], data["licence"], data["text"], strict=True):
            package, licence, text = row
            counts[package, licence, f"{split}_documents"] += 1
            counts[package, licence, f"{split}_characters"] += len(text)

    # A row for each package, and the sum of all.
    packages = sorted({(package, licence) for package, licence, _ in counts})
    rows: list[list[str | int]] = []
    totals = [0] * len(_TABLE_COLUMNS)
    for package, licence in packages:
        numbers = [counts[package, licence, column] for column in _TABLE_COLUMNS]
        totals = [total + number for total, number in zip(totals, numbers, strict=True)]
        rows.append([package, licence, *numbers])
    return [*rows, ["total", "", *totals]]


def markdown_table(header: list[str], rows: list[list[str | int]]) -> str:
    """Returns a table with aligned columns; numbers are right-aligned, with thousands separators."""
    texts = [header]
    for row in rows:
        texts.append([_table_cell(value) for value in row])

    is_number = [isinstance(value, int) for value in rows[0]]
    widths = []
    for column in range(len(header)):
        widths.append(max(len(row[column]) for row in texts))

    lines = []
    for row in texts:
        cells = []
        for text, width, right in zip(row, widths, is_number, strict=True):
            cells.append(text.rjust(width) if right else text.ljust(width))
        lines.append("| " + " | ".join(cells) + " |")

    # The rule under the header, with a colon where a column is right-aligned.
    dashes = []
    for width, right in zip(widths, is_number, strict=True):
        dashes.append("-" * (width + 1) + (":" if right else "-"))
    lines.insert(1, "|" + "|".join(dashes) + "|")
    return "\n".join(lines)


def _table_cell(value: str | int) -> str:
    return f"{value:,}" if isinstance(value, int) else value.replace("|", "\\|")
