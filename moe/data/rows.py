"""Rows of tables as people have them: JSONL, CSV, Parquet, datasets saved to disk, and datasets of the hub.

Comes after `folders`, before `documents` and `pair_files`, which read texts from the rows.
"""

import csv
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe.checks import shown
from moe.data.folders import PARQUET, SEPARATORS, TABLE_SUFFIXES, files_of, parse_folder
from moe.errors import ConfigError, DataError, did_you_mean
from moe.parsing import not_utf8, open_data, read_json_lines, reading, suffix_of

if TYPE_CHECKING:
    import datasets

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+){1,2}")
_LONGEST_FIELD = 2**31 - 1

Row = Mapping[str, Any]


def read_rows(
    source: Path, *, advice: str, columns: Collection[str] | None = None
) -> Iterator[tuple[str, Row]]:
    """Yields the place, e.g. `a.csv, line 7`, and the values by column of each row of a table.

    A `.csv` or `.tsv` file begins with the names of its columns; TSV has no quotation marks. A folder is
    a dataset that `datasets` saved, or holds such files; `FOLDER:SPLIT` is a split of it, see `files_of`.
    `NAME:SPLIT` and `NAME:CONFIG:SPLIT` are datasets of the Hugging Face hub. Any other file is JSONL.
    A file whose name also ends in `.gz` is decompressed.

    Args:
        source: The table.
        advice: What a row should be, for messages.
        columns: Columns that are needed; files that allow it are read no further. None for all.

    Raises:
        DataError: When the table does not exist or cannot be read; the message says where.
    """
    suffix = suffix_of(source)
    folder = parse_folder(source)
    if folder is not None:
        files = [] if folder.is_saved else files_of(source)
        tables = [file for file in files if suffix_of(file) in TABLE_SUFFIXES]
        for file in tables:
            yield from read_rows(file, advice=advice, columns=columns)
        if not tables:
            dataset = load_saved_dataset(source, advice=advice)
            yield from _rows_of(dataset, str(source), columns, advice)
    elif suffix in SEPARATORS:
        yield from _read_csv(source, columns, advice)
    elif suffix == PARQUET:
        yield from read_parquet(source, advice=advice, columns=columns)
    elif is_hub_name(source):
        dataset = load_from_hub(str(source), streaming=False)
        yield from _rows_of(dataset, str(source), columns, advice)
    else:
        for number, row in read_json_lines(source, advice=advice):
            yield f"{source}, line {number}", row


def parse_columns(values: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """Parses texts `NAME=COLUMN`, and returns the column of the table for each name.

    Raises:
        ConfigError: When a name is unknown or given twice, or a column is missing.
    """
    columns: dict[str, str] = {}
    for value in values:
        name, separator, column = value.partition("=")
        if name not in known or not separator or not column:
            raise ConfigError(
                f"--columns is {shown(value)}; expected NAME=COLUMN with a name of {', '.join(known)}, e.g. "
                f"{known[0]}=question."
            )
        if name in columns:
            raise ConfigError(f"--columns gives {name!r} twice: {columns[name]!r} and {column!r}.")
        columns[name] = column
    return columns


def text_of(row: Row, column: str, *, where: object, advice: str) -> str:
    """Returns the text in a column of a row.

    Raises:
        DataError: When the column is missing or holds something else.
    """
    value = row.get(column)
    if isinstance(value, str):
        return value
    if column in row:
        raise DataError(f"{where}: {column} is {shown(value)}. {advice}")
    hint = did_you_mean(column, list(row))
    raise DataError(f"{where}: {column} is missing.{hint} {advice}")


def _read_csv(
    path: Path, columns: Collection[str] | None, advice: str
) -> Iterator[tuple[str, Row]]:
    """Yields the rows of a CSV or TSV file with a header."""
    # A document may be longer than the 128 KiB of Python's default.
    csv.field_size_limit(_LONGEST_FIELD)
    separator = SEPARATORS[suffix_of(path)]
    quoting = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
    where = str(path)
    with open_data(path, advice=advice) as file:
        lines = _decoded_lines(file, path)
        rows = csv.DictReader(lines, delimiter=separator, strict=True, quoting=quoting)
        try:
            names = rows.fieldnames or ()
            check_columns(str(path), names, columns, advice)
            for row in rows:
                where = f"{path}, line {rows.line_num}"
                if None in row or None in row.values():
                    form = f"the row does not have the columns {', '.join(names)}"
                    raise DataError(f"{where}: {form}. {advice}")
                yield where, row
        except csv.Error as error:
            raise DataError(f"{where}: the row after it is not CSV: {error}. {advice}") from error


def _decoded_lines(file: Iterable[bytes], path: Path) -> Iterator[str]:
    """Yields the lines of a file; raises a DataError for one that is not UTF-8."""
    for number, line in enumerate(file, start=1):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise DataError(not_utf8(f"{path}, line {number}", line[error.start])) from None


def check_columns(
    source: str, names: Sequence[str], columns: Collection[str] | None, advice: str
) -> list[str]:
    """Returns the columns to read from a table.

    Args:
        source: The table, for messages.
        names: Names of its columns.
        columns: Columns that are needed; None for all.
        advice: What a row should be, for messages.

    Raises:
        DataError: When it has none of them, or one more than once.
    """
    present = [name for name in names if columns is None or name in columns]
    if names and not present:
        raise DataError(f"{source} has the columns {', '.join(names)}. {advice}")
    repeated = [name for name in present if present.count(name) > 1]
    if repeated:
        raise DataError(f"{source} repeats the column {repeated[0]!r}. Keep one of them.")
    return present


def read_parquet(
    path: Path, *, advice: str, columns: Collection[str] | None = None
) -> Iterator[tuple[str, Row]]:
    """Yields the place and the values of each row of a Parquet file, a batch of rows in memory at a time.

    Args:
        path: The file.
        advice: What the user can do, for messages.
        columns: Columns that are read, where they are there; None for all.

    Raises:
        DataError: When it cannot be read.
    """
    import pyarrow.parquet  # takes 0.2 s

    with reading(path, advice=advice, problem="cannot be read as Parquet"), path.open("rb") as file:
        table = pyarrow.parquet.ParquetFile(file)
        names = table.schema_arrow.names
        chosen = check_columns(str(path), names, columns, advice)
        batches = table.iter_batches(columns=chosen)
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, row in enumerate(rows, start=1):
            yield f"{path}, row {number}", row


def load_saved_dataset(source: Path, *, advice: str) -> "datasets.Dataset":
    """Returns a dataset that was saved to a folder, `FOLDER` or `FOLDER:SPLIT`; its rows stay on disk.

    Raises:
        DataError: When the dataset or the split does not exist.
    """
    import datasets

    folder, _, split = parse_folder(source) or (source, None, None)
    problem = "cannot be read as tables or a dataset saved by `datasets`"
    with reading(folder, advice=advice, problem=problem):
        saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, datasets.DatasetDict):
        names = list(map(str, saved))
        if split not in names:
            raise DataError(
                f"{folder} has the splits {', '.join(names)}. Name one of them, e.g. {folder}:{names[0]}."
            )
        saved = saved[split]
    elif split:
        raise DataError(f"{folder} is a dataset without splits. Leave out ':{split}'.")
    return saved


def is_hub_name(source: Path) -> bool:
    """Returns whether a source is `NAME:SPLIT` or `NAME:CONFIG:SPLIT`, and no file or folder."""
    is_other = source.exists() or suffix_of(source) in TABLE_SUFFIXES or parse_folder(source)
    return not is_other and _HUB_NAME.fullmatch(str(source)) is not None


def load_from_hub(name: str, *, streaming: bool) -> Any:
    """Returns a split of a dataset of the hub; the rows of a stream are fetched as they are read.

    Raises:
        DataError: When there is none.
    """
    import datasets

    repository, *config, split = name.split(":")
    load: Any = datasets.load_dataset  # whose overloads want a literal
    advice = "Check NAME:CONFIG:SPLIT and the connection, or give a file."
    with reading(f"The dataset {name} of the hub", advice=advice):
        return load(repository, *config, split=split, streaming=streaming)


def _rows_of(
    dataset: "datasets.Dataset", name: str, columns: Collection[str] | None, advice: str
) -> Iterator[tuple[str, Row]]:
    """Yields the rows of a dataset in memory-mapped files.

    Only the columns that are needed are read, as Arrow: images and sounds are neither decoded nor fetched.
    """
    chosen = check_columns(name, dataset.column_names, columns, advice)
    batches: Any = dataset.select_columns(chosen).with_format("arrow").iter(1000)
    rows = chain.from_iterable(batch.to_pylist() for batch in batches)
    with reading(name, advice=advice):
        for number, row in enumerate(rows, start=1):
            yield f"{name}, row {number}", row
