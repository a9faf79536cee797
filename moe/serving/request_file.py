"""Requests: a text a line, JSONL, or the rows of a table; answer_file.py writes their answers."""

from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

from moe.checks import check, shown
from moe.data.pair_files import COLUMNS
from moe.data.rows import PARQUET, SEPARATORS, Row, read_rows, text_of
from moe.errors import ConfigError, DataError, MoEError
from moe.parsing import open_data, parse_json_object, suffix_of
from moe.serving.batch_generator import Item, Request
from moe.serving.sampling import Sampling

Line = tuple[int, dict[str, Any], Item]
"""Number of a line or row from 1, its object, and its request or the error that refuses it."""

Columns = Mapping[str, str]
"""Columns by our names for them, where they differ."""

_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_ADVICE = 'Expected rows like {"inputs": "..."}; --columns names other columns.'


def read_requests(file: Path, columns: Columns, defaults: Sampling) -> Iterator[Line]:
    """Yields the requests in JSONL, in a table of `read_rows`, or in a file with a text a line.

    Args:
        file: The file; lines may come from a pipe.
        columns: Columns of `inputs`, `targets` and `group`, the only ones that are read of Parquet
            files and datasets.
        defaults: Settings that a request does not have.

    Raises:
        DataError: When the file cannot be read, or a table has no column `inputs`.
        ConfigError: When a file with a text a line should have columns.
    """
    if is_table(file):
        names = [columns.get(name, name) for name in COLUMNS]
        rows = read_rows(file, advice=_ADVICE, columns=names)
        for number, (where, row) in enumerate(rows, start=1):
            if names[0] not in row:
                raise DataError(f"{where}: {names[0]} is missing. {_ADVICE}")
            record = _rename(row, columns)
            text = record["inputs"]
            item: Item = DataError(f"{where}: {names[0]} is {shown(text)}, not a text.")
            yield number, record, Request(text) if isinstance(text, str) else item
        return

    is_json = suffix_of(file) in _JSON_SUFFIXES
    if columns and not is_json:
        raise ConfigError(f"--columns cannot be combined with {file}, a text a line. Leave it out.")
    with open_data(file, advice="Give a file of requests.") as lines:
        yield from read_lines(lines, columns, defaults, is_json=is_json)


def is_table(file: Path) -> bool:
    """Returns whether requests are the rows of a table, not lines."""
    return suffix_of(file) in (*SEPARATORS, PARQUET) or not (file.is_file() or file.is_fifo())


def read_lines(
    lines: Iterable[bytes], columns: Columns, defaults: Sampling, *, is_json: bool = False
) -> Iterator[Line]:
    """Yields a request for each line of text or JSON that is not empty.

    A pipe has no suffix: lines are JSON, too, if the first is an object with `inputs`.
    """
    source = iter(lines)
    head = [line.removeprefix(BOM_UTF8) for line in islice(source, 1)]
    is_json = is_json or any(line.startswith(b"{") and b'"inputs":' in line for line in head)
    for number, line in enumerate(chain(head, source), start=1):
        where = f"line {number}"
        text = line.decode(errors="backslashreplace").rstrip("\r\n")
        if is_json and not text.strip():
            continue
        record: dict[str, Any] = {"inputs": text}
        try:
            if is_json:
                row = parse_json_object(line, where=where, advice=_ADVICE)
                record = _rename(row, columns)
            elif "\0" in text or not line.startswith(text.encode()):
                raise DataError(
                    f"{where} is not UTF-8 text: {shown(text)}. Convert the file, e.g. `iconv -f latin1 -t utf-8`."
                )
            inputs = text_of(record, "inputs", where=where, advice=_ADVICE)
            item: Item = Request(inputs, _sampling(record, defaults))
        except MoEError as error:
            item = DataError(str(error))
        yield number, record, item


def _rename(row: Row, columns: Columns) -> dict[str, Any]:
    """Returns a row with our names for its columns."""
    named = {name: row[column] for name, column in columns.items() if column in row}
    return {name: row[name] for name in row if name not in columns.values()} | named


def _sampling(record: dict[str, Any], defaults: Sampling) -> Sampling | None:
    """Returns the settings of a request; None for the defaults."""
    sampling = record.get("sampling")
    if sampling is None:
        return None
    names = vars(defaults)
    holds = isinstance(sampling, dict) and sampling.keys() <= names.keys()
    check(holds, "sampling", sampling, f"an object with {', '.join(names)}")
    if isinstance(sampling.get("stop"), list):
        sampling = {**sampling, "stop": tuple(sampling["stop"])}
    return Sampling(**{**names, **sampling})
