"""Rows of tables as people have them: JSONL, CSV, Parquet, datasets saved to disk, and datasets of the hub.

Comes before `documents` and `pair_files`, which read texts from the rows.
"""

import csv
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from moe.checks import shown
from moe.errors import ConfigError, DataError, did_you_mean
from moe.opening import open_to_read
from moe.parsing import read_json_lines, refuse

if TYPE_CHECKING:
    import datasets

SEPARATORS = {".csv": ",", ".tsv": "\t"}
PARQUET = ".parquet"
TABLE_SUFFIXES = (".jsonl", *SEPARATORS, PARQUET)

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+){1,2}")
_LONGEST_FIELD = 2**31 - 1

Row = Mapping[str, Any]


def read_rows(
    source: Path,
    *,
    advice: str,
    columns: Collection[str] | None = None,
    pipe: bool = False,
    bad: Callable[[DataError], None] = refuse,
) -> Iterator[tuple[str, Row]]:
    """Yields the place, e.g. `a.csv, line 7`, and the values by column of each row of a table.

    A `.csv` or `.tsv` file begins with the names of its columns. A folder is a dataset that `datasets`
    saved, or holds Parquet files; `FOLDER:SPLIT` is a split of a saved one. `NAME:SPLIT` and
    `NAME:CONFIG:SPLIT` are datasets of the Hugging Face hub. Any other file is JSONL.

    Args:
        source: The table.
        advice: What a row should be, for messages.
        columns: Columns that are needed; files that allow it are read no further. None for all.
        pipe: Whether JSONL may come from a pipe; see `read_text`.
        bad: Called with the error of each row that is not one; rows after it are read unless it raises.

    Raises:
        DataError: When the table does not exist or cannot be read; the message says where.
    """
    suffix = source.suffix.lower()
    if suffix in SEPARATORS:
        yield from _read_csv(source, SEPARATORS[suffix], advice, bad)
    elif suffix == PARQUET:
        yield from read_parquet(source, advice=advice, columns=columns)
    elif source.is_dir() or _split_of_folder(source):
        yield from _read_folder(source, columns, advice)
    elif is_hub_name(source):
        yield from _rows_of(_load_from_hub(str(source), streaming=False), str(source))
    else:
        for number, row in read_json_lines(source, advice=advice, nan=True, pipe=pipe, bad=bad):
            yield f"{source}, line {number}", row


def parse_columns(values: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """Returns the columns of a table by the names that are read from it, of texts `NAME=COLUMN`.

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
    path: Path, separator: str, advice: str, bad: Callable[[DataError], None]
) -> Iterator[tuple[str, Row]]:
    """Yields the rows of a CSV file with a header."""
    csv.field_size_limit(
        _LONGEST_FIELD
    )  # a document may be longer than the 128 KiB of Python's default
    where = str(path)
    try:
        with open(path, encoding="utf-8-sig", newline="", opener=open_to_read) as file:
            rows = csv.DictReader(file, delimiter=separator, strict=True)
            for row in rows:
                where = f"{path}, line {rows.line_num}"
                if None in row or None in row.values():
                    names = ", ".join(rows.fieldnames or ())
                    bad(DataError(f"{where}: the row does not have the columns {names}. {advice}"))
                    continue
                yield where, row
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: the text after it is not UTF-8. Convert it, e.g. `iconv -f latin1 -t utf-8`."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. {advice}") from error
    except csv.Error as error:
        raise DataError(f"{where}: the row after it is not CSV: {error}. {advice}") from error


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

    number = 0
    try:
        with open(path, "rb", opener=open_to_read) as file:
            table = pyarrow.parquet.ParquetFile(file)
            names = table.schema_arrow.names
            chosen = None if columns is None else [name for name in columns if name in names]
            if chosen == []:
                raise DataError(f"{path} has the columns {', '.join(names)}. {advice}")
            for batch in table.iter_batches(columns=chosen):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except DataError:
        raise
    except (OSError, ValueError, pyarrow.ArrowException) as error:  # not UTF-8 is a ValueError
        raise DataError(f"{path} cannot be read as Parquet: {error}. {advice}") from error


def _read_folder(
    source: Path, columns: Collection[str] | None, advice: str
) -> Iterator[tuple[str, Row]]:
    """Yields the rows of a dataset that was saved to a folder, or of the Parquet files in it."""
    files = sorted(source.glob(f"*{PARQUET}"))
    if files:
        for file in files:
            yield from read_parquet(file, advice=advice, columns=columns)
        return

    yield from _rows_of(load_saved_dataset(source, advice=advice), str(source))


def load_saved_dataset(source: Path, *, advice: str) -> "datasets.Dataset":
    """Returns a dataset that was saved to a folder, `FOLDER` or `FOLDER:SPLIT`; its rows stay on disk.

    Raises:
        DataError: When the dataset or the split does not exist.
    """
    import datasets
    import pyarrow

    split = _split_of_folder(source)
    folder = str(source).removesuffix(f":{split}")
    try:
        saved = datasets.load_from_disk(folder)
    except (FileNotFoundError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{folder} holds no Parquet files and no dataset saved by `datasets`. {advice}"
        ) from error
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


def _split_of_folder(source: Path) -> str:
    """Returns SPLIT of FOLDER:SPLIT; empty if the source is something else."""
    folder, separator, split = str(source).rpartition(":")
    return split if separator and not source.exists() and Path(folder).is_dir() else ""


def is_hub_name(source: Path) -> bool:
    """Returns whether a source is `NAME:SPLIT` or `NAME:CONFIG:SPLIT`, and no file or folder."""
    is_other = (
        source.exists() or source.suffix.lower() in TABLE_SUFFIXES or _split_of_folder(source)
    )
    return not is_other and _HUB_NAME.fullmatch(str(source)) is not None


def open_hub_stream(name: str) -> "datasets.IterableDataset":
    """Returns a split of a dataset of the hub, whose rows are fetched as they are read.

    Raises:
        DataError: When there is none.
    """
    return _load_from_hub(name, streaming=True)


def _load_from_hub(name: str, *, streaming: bool) -> Any:
    import datasets
    from datasets.exceptions import DatasetsError

    repository, *config, split = name.split(":")
    load: Any = datasets.load_dataset  # whose overloads want a literal
    try:
        return load(repository, *config, split=split, streaming=streaming)
    except (DatasetsError, OSError, RuntimeError, ValueError) as error:
        raise DataError(
            f"The dataset {name} of the hub cannot be read: {error}. Check NAME:CONFIG:SPLIT and the connection, or "
            "give a file."
        ) from error


def _rows_of(dataset: "datasets.Dataset", name: str) -> Iterator[tuple[str, Row]]:
    """Yields the rows of a dataset in memory-mapped files."""
    for number, row in enumerate(cast("Iterable[Row]", dataset), start=1):
        yield f"{name}, row {number}", row
