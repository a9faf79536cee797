"""Tables larger than memory, in blocks of rows that are read one at a time.

Comes after `rows` and `documents`, before `token_stream`. Parquet files, JSONL files and datasets on
disk are read from any block on; of everything else the blocks before are read and thrown away.
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

_ADVICE = "Name the column of the texts by --column."

BlockRow = tuple[object, Row]
"""A row's place, whose text is e.g. `a.jsonl, line 7`, and its values by column."""

T = TypeVar("T")


class Blocks(NamedTuple):
    """A table in blocks of rows.

    Attributes:
        read: Yields the rows of a block; a DataError names a file that cannot be read, or is smaller
            than before.
        identity: Text that is equal for tables of the same rows in the same blocks: names, sizes,
            numbers.
        version: Text that changes when a file is written again, e.g. its time.
        shards: Numbers of all blocks, in ranges that are fast to read in order; None for a table that
            is only read from its beginning, until a block has no rows.
    """

    read: Callable[[int], Iterator[BlockRow]]
    identity: str
    version: str
    shards: list[range] | None


def open_blocks(source: Path, column: str) -> Blocks:
    """Returns the blocks of a table larger than memory.

    Args:
        source: A Parquet or JSONL file or a folder of them, a dataset that `datasets` saved
            (`FOLDER` or `FOLDER:SPLIT`), the name of one on the hub (`NAME:CONFIG:SPLIT`, which is
            streamed), or other files as `read_files` reads them. See `files_of` for splits of folders.
        column: Column of the texts; files of text have one, whatever its name.

    Raises:
        DataError: When there is no such source.
    """
    if is_hub_name(source):
        return stream_blocks(load_from_hub(str(source), streaming=True), str(source), column)
    folder = parse_folder(source)
    if folder is not None and folder.is_saved:
        dataset = load_saved_dataset(source, advice="Save it again.")
        return _dataset_blocks(dataset, str(source), column)

    files = files_of(source)
    if not files or (folder is None and suffix_of(source) not in SUFFIXES):
        raise DataError(
            f"{source} is not a corpus and contains no text. Give a corpus made by `stmoe corpus`, files ending in "
            f"{', '.join(SUFFIXES)}, or a dataset saved by `datasets`."
        )
    suffixes = {file.suffix.lower() for file in files}
    if suffixes == {PARQUET}:
        return _parquet_blocks(files, column)
    if suffixes == {".jsonl"}:
        return _jsonl_blocks(files)
    return _file_blocks(files, column)


def _parquet_blocks(files: Sequence[Path], column: str) -> Blocks:
    """Returns blocks of the row groups of Parquet files: each row group is a shard.

    Raises:
        DataError: When a file is no Parquet file, or has no such column.
    """
    import pyarrow.parquet

    groups: list[tuple[Path, int, int]] = []  # file, row group, rows before it in the file
    group_rows: list[int] = []
    for file in files:
        with reading(file, advice="Restore it.", problem="cannot be read as Parquet"):
            metadata = pyarrow.parquet.read_metadata(file)
        check_columns(str(file), metadata.schema.to_arrow_schema().names, [column], _ADVICE)
        first_row = 0
        for group in range(metadata.num_row_groups):
            num_rows = metadata.row_group(group).num_rows
            if num_rows:
                groups.append((file, group, first_row))
                group_rows.append(num_rows)
                first_row += num_rows

    block_rows = _rows_of_block(sum(group_rows))
    shards = _consecutive(-(-rows // block_rows) for rows in group_rows)
    starts = [shard.start for shard in shards]
    batches = _Parts()

    def read_group(file: Path, group: int) -> Iterator[Any]:
        with pyarrow.parquet.ParquetFile(file) as table:
            yield from table.iter_batches(
                block_rows, row_groups=[group], columns=[column], use_threads=False
            )

    def read(block: int) -> Iterator[BlockRow]:
        shard = bisect_right(starts, block) - 1
        file, group, first_row = groups[shard]
        offset = block - starts[shard]
        with reading(file, advice="Restore it.", problem="cannot be read as Parquet"):
            batch = batches.read(shard, offset, lambda: read_group(file, group))
            assert batch is not None, f"{file} has as many rows as when the run began"
            rows = batch.to_pylist()
        for number, row in enumerate(rows, start=first_row + offset * block_rows + 1):
            yield f"{file}, row {number}", row

    identity = repr([_names_and_sizes(files), group_rows, block_rows])
    return Blocks(read, identity, _times(files), shards)


def _jsonl_blocks(files: Sequence[Path]) -> Blocks:
    """Returns blocks of about a megabyte of JSONL files: the lines that begin in it."""
    sizes = [_size(file) for file in files]
    block_bytes = min(BLOCK_BYTES, max(1, -(-sum(sizes) // LEAST_BLOCKS)))
    blocks: list[tuple[Path, int, int]] = []  # file, first byte, byte after the last
    counts: list[int] = []
    for file, size in zip(files, sizes, strict=True):
        starts = range(0, size, block_bytes)
        blocks += [(file, start, min(start + block_bytes, size)) for start in starts]
        counts += _shard_sizes(len(starts))

    def read(block: int) -> Iterator[BlockRow]:
        file, start, stop = blocks[block]
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
                    yield where, parse_json_object(line, where=where, advice=advice)
                position += len(line)
        if position < stop:
            raise _smaller(file)

    identity = repr([_names_and_sizes(files), block_bytes])
    return Blocks(read, identity, _times(files), _consecutive(counts))


def _dataset_blocks(dataset: "datasets.Dataset", name: str, column: str) -> Blocks:
    """Returns blocks of a dataset in memory-mapped files; as Arrow, images and sounds are not decoded.

    Raises:
        DataError: When there is no such column.
    """
    check_columns(name, dataset.column_names, [column], _ADVICE)
    table = dataset.select_columns([column]).with_format("arrow")
    block_rows = _rows_of_block(len(dataset))
    files = [Path(file["filename"]) for file in dataset.cache_files]

    def read(block: int) -> Iterator[BlockRow]:
        start = block * block_rows
        with reading(name, advice="Restore it."):
            batch: Any = table[start : start + block_rows]
            rows = batch.to_pylist()
        for number, row in enumerate(rows, start=start + 1):
            yield f"{name}, row {number}", row

    identity = repr([_names_and_sizes(files), len(dataset), block_rows])
    shards = _consecutive(_shard_sizes(-(-len(dataset) // block_rows)))
    return Blocks(read, identity, _times(files), shards)


def _sequential_blocks(
    rows: Callable[[], Iterator[BlockRow]], name: object, version: str = ""
) -> Blocks:
    """Returns blocks of rows that are only read from the beginning: a later block skips those before it."""
    blocks = _Parts()

    def read_all() -> Iterator[list[BlockRow]]:
        remaining = rows()
        return iter(lambda: list(islice(remaining, BLOCK_ROWS)), [])

    def read(block: int) -> Iterator[BlockRow]:
        yield from blocks.read("", block, read_all) or ()

    return Blocks(read, repr([name, BLOCK_ROWS]), version, None)


def _file_blocks(files: Sequence[Path], column: str) -> Blocks:
    """Returns blocks of files of other kinds, or of several: CSV, and a document for each file of text."""
    sizes = [_size(file) for file in files]

    def rows() -> Iterator[BlockRow]:
        advice = f"Expected a text in the column {column!r} of each row."
        for file, size in zip(files, sizes, strict=True):
            if suffix_of(file) not in TABLE_SUFFIXES:
                yield file, {column: read_document(file)}
                continue
            yield from read_rows(file, advice=advice, columns=[column])
            if _size(file) < size:
                raise _smaller(file)

    return _sequential_blocks(rows, _names_and_sizes(files), _times(files))


def stream_blocks(stream: "datasets.IterableDataset", name: str, column: str) -> Blocks:
    """Returns blocks of a stream, which need not be on this machine; no other column is fetched.

    Raises:
        DataError: When there is no such column.
    """
    if stream.column_names is not None:
        check_columns(name, stream.column_names, [column], _ADVICE)
        # Decoding comes first: `datasets` may have put it before the columns are chosen.
        stream = stream.decode(False).select_columns([column])

    def rows() -> Iterator[BlockRow]:
        for number, row in enumerate(stream, start=1):
            yield f"{name}, row {number}", row

    return _sequential_blocks(rows, name)


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


def _rows_of_block(num_rows: int) -> int:
    return min(BLOCK_ROWS, max(1, -(-num_rows // LEAST_BLOCKS)))


def _shard_sizes(num_blocks: int) -> list[int]:
    """Returns the number of blocks of each shard."""
    starts = range(0, num_blocks, BLOCKS_OF_SHARD)
    return [min(BLOCKS_OF_SHARD, num_blocks - start) for start in starts]


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
