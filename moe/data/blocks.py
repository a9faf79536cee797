"""Tables larger than memory, in blocks of rows that are read one at a time.

Comes after `rows` and `documents`, before `token_stream`. Parquet files, JSONL files and datasets on
disk are read from any block on; of everything else the blocks before are read and thrown away.

Blocks of every kind have:
- `identity`: text that is equal for tables of the same rows in the same blocks: names, sizes, numbers;
- `version`: text that changes when a file is written again, e.g. its time;
- `shards`: numbers of all blocks, in ranges that are fast to read in order; None for a table that is only
  read from its beginning, until a block has no rows;
- `read`: yields the rows of a block; a DataError names a file that cannot be read, or is smaller than before.
"""

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from moe.data.documents import read_document
from moe.data.folders import PARQUET, SUFFIXES, TABLE_SUFFIXES, files_of, parse_folder
from moe.data.rows import (
    Row,
    check_columns,
    is_hub_name,
    load_from_hub,
    load_saved_dataset,
    read_rows,
)
from moe.errors import DataError
from moe.parsing import open_data, parse_json_object, reading, suffix_of

if TYPE_CHECKING:
    import datasets

BLOCK_ROWS = 512
BLOCK_BYTES = 2**20
"""Bytes of a block of JSONL."""

BLOCKS_OF_SHARD = 64
"""Blocks of a shard of JSONL or of a dataset; a row group is a shard of Parquet."""

LEAST_BLOCKS = 20
"""Small tables are divided into about as many blocks, since one block is held out."""

BlockRow = tuple[object, Row]
"""A row's place, whose text is e.g. `a.jsonl, line 7`, and its values by column."""

T = TypeVar("T")


def open_blocks(source: Path, columns: Sequence[str]) -> "Blocks":
    """Returns the blocks of a table larger than memory.

    Args:
        source: A Parquet or JSONL file or a folder of them, a dataset that `datasets` saved
            (`FOLDER` or `FOLDER:SPLIT`), the name of one on the hub (`NAME:CONFIG:SPLIT`, which is
            streamed), or other files as `read_files` reads them. See `files_of` for splits of folders.
        columns: Columns that are needed; for files of text one, which holds the text.

    Raises:
        DataError: When there is no such source.
    """
    if is_hub_name(source):
        return stream_blocks(load_from_hub(str(source), streaming=True), str(source), columns)
    folder = parse_folder(source)
    is_files = not folder.is_saved if folder else suffix_of(source) in SUFFIXES
    if not is_files:
        advice = (
            f"Give a file or folder of {', '.join(SUFFIXES)}, a dataset saved by `datasets`, or, to pre-train, a "
            "corpus that `stmoe corpus` made."
        )
        return DatasetBlocks(load_saved_dataset(source, advice=advice), str(source), columns)

    files = files_of(source)
    if not files:
        raise DataError(
            f"{source} is not a corpus and contains no text. Give a corpus made by `stmoe corpus`, or files ending in "
            f"{', '.join(SUFFIXES)}."
        )
    suffixes = {file.suffix.lower() for file in files}
    if suffixes == {PARQUET}:
        return ParquetBlocks(files, columns)
    if suffixes == {".jsonl"}:
        return JsonlBlocks(files)
    return _file_blocks(files, columns)


class ParquetBlocks:
    """Blocks of the row groups of Parquet files: each row group is a shard."""

    def __init__(self, files: Sequence[Path], columns: Sequence[str]) -> None:
        """Reads the number of rows of each file, not the rows.

        Raises:
            DataError: When a file is no Parquet file, or has no such column.
        """
        self._columns = list(columns)
        self._groups: list[
            tuple[Path, int, int]
        ] = []  # file, row group, rows before it in the file
        group_rows: list[int] = []
        for file in files:
            first_row = 0
            for group, num_rows in enumerate(_rows_of_groups(file, columns)):
                if not num_rows:
                    continue
                self._groups.append((file, group, first_row))
                group_rows.append(num_rows)
                first_row += num_rows

        self._block_rows = _rows_of_block(sum(group_rows))
        self.shards = _consecutive(-(-rows // self._block_rows) for rows in group_rows)
        self.identity = repr([_names_and_sizes(files), group_rows, self._block_rows])
        self.version = _times(files)
        self._starts = [shard.start for shard in self.shards]
        self._batches = _Parts()

    def read(self, block: int) -> Iterator[BlockRow]:
        """Yields the rows of a block."""
        shard = bisect_right(self._starts, block) - 1
        file, group, first_row = self._groups[shard]
        offset = block - self._starts[shard]
        with reading(file, advice="Restore it.", problem="cannot be read as Parquet"):
            batch = self._batches.read(shard, offset, lambda: self._read_group(file, group))
            assert batch is not None, f"{file} has as many rows as when the run began"
            rows = batch.to_pylist()
        first_row += offset * self._block_rows + 1
        for number, row in enumerate(rows, start=first_row):
            yield f"{file}, row {number}", row

    def _read_group(self, file: Path, group: int) -> Iterator[Any]:
        """Yields the batches of a row group."""
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(file) as table:
            yield from table.iter_batches(
                self._block_rows, row_groups=[group], columns=self._columns, use_threads=False
            )


class JsonlBlocks:
    """Blocks of about a megabyte of JSONL files: the lines that begin in it."""

    def __init__(self, files: Sequence[Path]) -> None:
        sizes = [_size(file) for file in files]
        block_bytes = min(BLOCK_BYTES, max(1, -(-sum(sizes) // LEAST_BLOCKS)))
        self._blocks: list[tuple[Path, int, int]] = []  # file, first byte, byte after the last
        counts: list[int] = []
        for file, size in zip(files, sizes, strict=True):
            starts = range(0, size, block_bytes)
            self._blocks += [(file, start, min(start + block_bytes, size)) for start in starts]
            counts += [len(part) for part in _parts(len(starts))]
        self.shards = _consecutive(counts)
        self.identity = repr([_names_and_sizes(files), block_bytes])
        self.version = _times(files)

    def read(self, block: int) -> Iterator[BlockRow]:
        """Yields the rows of a block."""
        file, start, stop = self._blocks[block]
        with open_data(file, advice="Restore it.") as lines:
            # The line that reaches over the start belongs to the block before.
            if start:
                lines.seek(start - 1)
                lines.readline()
            position = lines.tell()
            while position < stop and (line := lines.readline()):
                if line.strip():
                    where = _LinePlace(file, position)
                    advice = "Repair the line."
                    yield where, parse_json_object(line, where=where, advice=advice, nan=True)
                position += len(line)
        if position < stop:
            raise _smaller(file)


class DatasetBlocks:
    """Blocks of a dataset in memory-mapped files."""

    def __init__(self, dataset: "datasets.Dataset", name: str, columns: Sequence[str]) -> None:
        """Chooses the columns; as Arrow, images and sounds are not decoded.

        Raises:
            DataError: When there is no such column.
        """
        _require_columns(name, columns, dataset.column_names)
        self._dataset = dataset.select_columns(list(columns)).with_format("arrow")
        self._name = name
        self._block_rows = _rows_of_block(len(dataset))
        num_blocks = -(-len(dataset) // self._block_rows)
        self.shards = _consecutive(len(part) for part in _parts(num_blocks))
        files = [Path(file["filename"]) for file in dataset.cache_files]
        self.identity = repr([_names_and_sizes(files), len(dataset), self._block_rows])
        self.version = _times(files)

    def read(self, block: int) -> Iterator[BlockRow]:
        """Yields the rows of a block."""
        start = block * self._block_rows
        with reading(self._name, advice="Restore it."):
            batch: Any = self._dataset[start : start + self._block_rows]
            rows = batch.to_pylist()
        for number, row in enumerate(rows, start=start + 1):
            yield f"{self._name}, row {number}", row


class SequentialBlocks:
    """Blocks of rows that are only read from the beginning: a later block skips those before it."""

    shards = None

    def __init__(
        self, rows: Callable[[], Iterator[BlockRow]], name: object, version: str = ""
    ) -> None:
        self._rows = rows
        self._blocks = _Parts()
        self.identity = repr([name, BLOCK_ROWS])
        self.version = version

    def read(self, block: int) -> Iterator[BlockRow]:
        """Yields the rows of a block."""
        yield from self._blocks.read("", block, self._read_all) or ()

    def _read_all(self) -> Iterator[list[BlockRow]]:
        rows = self._rows()
        return iter(lambda: list(islice(rows, BLOCK_ROWS)), [])


def _file_blocks(files: Sequence[Path], columns: Sequence[str]) -> SequentialBlocks:
    """Returns blocks of files of other kinds, or of several: CSV, and a document for each file of text."""
    sizes = [_size(file) for file in files]

    def rows() -> Iterator[BlockRow]:
        advice = f"Expected the columns {', '.join(columns)} in each row."
        for file, size in zip(files, sizes, strict=True):
            if suffix_of(file) not in TABLE_SUFFIXES:
                yield file, {columns[0]: read_document(file)}
                continue
            yield from read_rows(file, advice=advice, columns=columns)
            if _size(file) < size:
                raise _smaller(file)

    return SequentialBlocks(rows, _names_and_sizes(files), _times(files))


def stream_blocks(
    stream: "datasets.IterableDataset", name: str, columns: Sequence[str]
) -> SequentialBlocks:
    """Returns blocks of a stream, which need not be on this machine; no other column is fetched.

    Raises:
        DataError: When there is no such column.
    """
    if stream.column_names is not None:
        _require_columns(name, columns, stream.column_names)
        # Decoding comes first: `datasets` may have put it before the columns are chosen.
        stream = stream.decode(False).select_columns(list(columns))

    def rows() -> Iterator[BlockRow]:
        for number, row in enumerate(stream, start=1):
            yield f"{name}, row {number}", row

    return SequentialBlocks(rows, name)


Blocks = ParquetBlocks | JsonlBlocks | DatasetBlocks | SequentialBlocks


class _Parts(threading.local):
    """Reads parts of sequences: a later one than the last is read on to, an earlier one from the beginning.

    Each thread has its own position.
    """

    def __init__(self) -> None:
        self._parts: Iterator[Any] = iter(())
        self._sequence: Hashable = None  # that is read on, and by which process
        self._next = 0

    def read(self, sequence: Hashable, number: int, start: Callable[[], Iterator[T]]) -> T | None:
        """Returns a part of the sequence that `start` begins; None after its end."""
        # An open file must not be shared by processes.
        if self._sequence != (os.getpid(), sequence) or self._next > number:
            self._parts = start()
            self._next = 0
        self._sequence = None  # until the part is read
        part = next(islice(self._parts, number - self._next, None), None)
        self._sequence = (os.getpid(), sequence)
        self._next = number + 1
        return part


class _LinePlace(NamedTuple):
    """Where a line begins; its number is counted when it is shown."""

    file: Path
    position: int

    def __str__(self) -> str:
        with self.file.open("rb") as before:
            number = before.read(self.position).count(b"\n") + 1
        return f"{self.file}, line {number}"


def _rows_of_groups(file: Path, columns: Sequence[str]) -> list[int]:
    """Returns the rows of each row group of a Parquet file."""
    import pyarrow.parquet

    with reading(file, advice="Restore it.", problem="cannot be read as Parquet"):
        metadata = pyarrow.parquet.read_metadata(file)
    names = metadata.schema.to_arrow_schema().names
    _require_columns(str(file), columns, names)
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _require_columns(source: str, columns: Sequence[str], names: Sequence[str]) -> None:
    """Raises a DataError when a table lacks a column, or has it twice."""
    advice = "Name the column of texts by --column, or those of pairs by --columns."
    present = check_columns(source, names, columns, advice)
    missing = [column for column in columns if column not in present]
    if missing:
        raise DataError(
            f"{source} has no column {missing[0]!r}; it has {', '.join(names)}. {advice}"
        )


def _rows_of_block(num_rows: int) -> int:
    return min(BLOCK_ROWS, max(1, -(-num_rows // LEAST_BLOCKS)))


def _parts(num_blocks: int) -> Iterator[range]:
    """Yields the blocks of each shard."""
    for start in range(0, num_blocks, BLOCKS_OF_SHARD):
        yield range(start, min(start + BLOCKS_OF_SHARD, num_blocks))


def _consecutive(counts: Iterable[int]) -> list[range]:
    """Returns consecutive ranges of these lengths, without empty ones."""
    ranges = []
    start = 0
    for count in counts:
        if count:
            ranges.append(range(start, start + count))
        start += count
    return ranges


def _smaller(file: Path) -> DataError:
    return DataError(f"{file} is smaller than when the run began. Restore it, then start again.")


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise DataError(
            f"{file} cannot be read: {error.strerror}. Give a file or folder."
        ) from error


def _names_and_sizes(files: Iterable[Path]) -> list[tuple[str, int]]:
    return [(file.name, _size(file)) for file in files]


def _times(files: Iterable[Path]) -> str:
    return repr([(str(file.resolve()), file.stat().st_mtime_ns) for file in files])
