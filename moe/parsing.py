"""Reads JSON, JSON lines and YAML into values and typed records; `to_json` is the reverse.

Reading never runs code: bytes that are not UTF-8, deep nesting and unexpected types all raise an
error of this library.
"""

import gzip
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from pydantic_core import to_json as encode_json
from yaml.constructor import ConstructorError

from moe.checks import shown
from moe.errors import ConfigError, DataError, MoEError, is_panic

T = TypeVar("T")

_adapter = cache(TypeAdapter)

# Formats by patterns of the first bytes of a file, and what to do about a file that is not UTF-8 text.
_FORMATS = {
    rb"\x1f\x8b": "compressed by gzip. Give it a name that ends in .gz",
    rb"PAR1": "Parquet. Give it a name that ends in .parquet",
    rb"PK\x03\x04": "a zip archive or a spreadsheet. Unpack it, or export it as CSV",
    rb"\xff\xfe|\xfe\xff|.?\0": "UTF-16. Convert it, e.g. `iconv -f utf-16 -t utf-8`",
}


@contextmanager
def reading(
    path: object, *, advice: str, problem: str = "cannot be read", error: type[MoEError] = DataError
) -> Iterator[None]:
    """Turns whatever a library raises while it reads a file into one error that names the file.

    Errors of this library pass unchanged.

    Args:
        path: The file or folder.
        advice: Advice for the user.
        problem: What is wrong with it, e.g. `is not YAML`.
        error: Class of the error.
    """
    try:
        yield
    except BaseException as failure:
        if isinstance(failure, MoEError) or not (
            isinstance(failure, Exception) or is_panic(failure)
        ):
            raise
        reason = getattr(failure, "strerror", None) or failure
        if isinstance(failure, KeyError):
            reason = f"it has no {failure}"
        text = " ".join(str(reason).split())[:300].rstrip(".") or type(failure).__name__
        raise error(f"{path} {problem}: {text}. {advice}") from failure


@contextmanager
def open_data(
    path: Path, *, advice: str = "Restore the file.", error: type[MoEError] = DataError
) -> Iterator[BufferedReader | gzip.GzipFile]:
    """Opens a text to read its bytes: a `.gz` file is decompressed, a byte order mark is skipped.

    Args:
        path: The file.
        advice: Advice for the user if it is missing or cannot be read.
        error: Class of the error.

    Raises:
        MoEError: When the file is missing, damaged, or of a format that is not UTF-8 text.
    """
    with reading(path, advice=advice, error=error), path.open("rb") as file:
        data = gzip.GzipFile(fileobj=file) if path.suffix.lower() == ".gz" else file
        head = data.peek(4)
        for pattern, kind in _FORMATS.items():
            if re.match(pattern, head, re.DOTALL):
                raise error(f"{path} is {kind}.")
        if head.startswith(b"\xef\xbb\xbf"):
            data.read(3)
        yield data


def suffix_of(path: Path) -> str:
    """Returns the ending of a file in lower case, before that of gzip: `.csv` of `A.CSV.gz`."""
    inner = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return inner.suffix.lower()


def read_text(
    path: Path, *, advice: str = "Restore the file.", error: type[MoEError] = DataError
) -> str:
    """Returns the text of a UTF-8 file; see `open_data`.

    Raises:
        MoEError: When the file cannot be read, or is not UTF-8; names the byte and line.
    """
    with open_data(path, advice=advice, error=error) as file:
        content = file.read()
    try:
        return content.decode()
    except UnicodeDecodeError as failure:
        line = content.count(b"\n", 0, failure.start) + 1
        place = f"at offset {failure.start} (line {line})"
        raise error(not_utf8(path, content[failure.start], place)) from failure


def not_utf8(where: object, byte: int, place: str = "in it") -> str:
    """Returns the message about a text that is not UTF-8, which names its first invalid byte."""
    advice = "Convert the file, e.g. `iconv -f latin1 -t utf-8`, or repair the line."
    return f"{where} is not UTF-8: byte 0x{byte:02x} {place}. {advice}"


def parse_json(
    text: str,
    *,
    where: object,
    advice: str = "Restore the file.",
    error: type[MoEError] = DataError,
) -> Any:
    """Returns the value of a JSON text; NaN and Infinity, which Python writes, are numbers.

    Args:
        text: The JSON.
        where: File and line, as a text of the message.
        advice: Advice for the user.
        error: Class of the error.

    Raises:
        MoEError: When the text is not JSON, nests too deeply, or has too long numbers.
    """
    try:
        return from_json(text.encode())
    except ValueError as failure:
        raise error(f"{where}: {shown(text[:60])} is not JSON ({failure}). {advice}") from failure


def read_json(
    path: Path, *, advice: str = "Restore the file.", error: type[MoEError] = DataError
) -> Any:
    """Returns the value of a JSON file; see `read_text` and `parse_json`."""
    text = read_text(path, advice=advice, error=error)
    return parse_json(text, where=str(path), advice=advice, error=error)


def parse_json_object(line: bytes, *, where: object, advice: str) -> dict[str, Any]:
    """Returns the object of a line of JSON; see `parse_json`.

    Raises:
        DataError: When the line is something else.
    """
    try:
        text = line.decode().rstrip("\r\n")
    except UnicodeDecodeError as failure:
        raise DataError(not_utf8(where, line[failure.start])) from failure
    value = parse_json(text, where=where, advice=advice)
    if not isinstance(value, dict):
        raise DataError(f"{where}: {shown(text[:60])} is not a JSON object. {advice}")
    return value


def read_json_lines(
    path: Path, *, advice: str = "Restore the file.", torn_end: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number, from 1, and the object of each line of a JSONL file.

    Empty lines are skipped.

    Args:
        path: The file.
        advice: What the user can do.
        torn_end: Whether to skip a torn last line, as in a file to which a run still appends.

    Raises:
        DataError: When the file cannot be read, or a line is not a JSON object; names the line.
    """
    with open_data(path, advice=advice) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue

            # A run that is killed may leave half a line at the end.
            where = f"{path}, line {number}"
            try:
                value = parse_json_object(line, where=where, advice=advice)
            except DataError:
                if torn_end and not line.endswith(b"\n"):
                    return
                raise
            yield number, value


def to_record(
    kind: type[T],
    value: Any,
    *,
    where: str,
    advice: str = "Restore the file.",
    error: type[MoEError] = DataError,
) -> T:
    """Returns a typed record of plain values.

    Args:
        kind: A NamedTuple, dataclass, TypedDict or any type that pydantic supports; annotations such as `Annotated[int,
            Field(ge=0)]` give bounds.
        value: Plain values, e.g. from JSON.
        where: File and line, for the message.
        advice: Advice for the user.
        error: Class of the error.

    Raises:
        MoEError: When fields are missing, unknown or of another type; names the first with its
            value.
    """
    # Pydantic would accept a list for a NamedTuple.
    if hasattr(kind, "_fields") and not isinstance(value, dict):
        raise error(
            f"{where}: its content is {shown(value)}; expected an object with fields. {advice}"
        )

    try:
        # Strictly, a dataclass takes an object only of JSON.
        if is_dataclass(kind):
            return _adapter(kind).validate_json(encode_json(value), strict=True)
        return _adapter(kind).validate_python(value, strict=True)

    # Report the first mistake.
    except ValidationError as failure:
        first = failure.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"]) or "its content"
        if first["type"].startswith("missing"):
            raise error(f"{where}: {name} is missing. {advice}") from failure
        reason = f"{shown(first['input'])}: {first['msg']}"
        raise error(f"{where}: {name} is {reason}. {advice}") from failure


def read_record(
    path: Path,
    kind: type[T],
    *,
    advice: str = "Restore the file.",
    error: type[MoEError] = DataError,
) -> T:
    """Returns a typed record of a JSON file; see `read_json` and `to_record`."""
    value = read_json(path, advice=advice, error=error)
    return to_record(kind, value, where=str(path), advice=advice, error=error)


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the settings in a YAML file.

    Raises:
        ConfigError: When there is no such file, or it is not a YAML mapping in UTF-8, or repeats a
            key.
    """
    advice = "Give the path of a YAML file of `key: value` lines."
    text = read_text(path, advice=advice, error=ConfigError)
    content = parse_yaml(text, where=str(path), advice=advice)
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} holds {shown(content)}; expected settings as `key: value` lines."
        )
    return content


def parse_yaml(text: str, *, where: str, advice: str) -> Any:
    """Returns the value of a YAML text.

    Args:
        text: The YAML.
        where: File or option, for the message.
        advice: Advice for the user.

    Raises:
        ConfigError: When the text is not YAML, or gives a key twice.
    """
    with reading(where, problem="is not YAML", advice=advice, error=ConfigError):
        return yaml.load(text, Loader=UniqueKeyLoader)


class UniqueKeyLoader(yaml.SafeLoader):
    """YAML in which no key is given twice, as happens in recipes of two `optim:` sections."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Returns the mapping of a node.

        Raises:
            ConstructorError: When a key is given twice.
        """
        keys = [key.value for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                mark = node.value[number][0].start_mark
                raise ConstructorError(None, None, f"the key {shown(key)} is given twice", mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that UniqueKeyLoader would read as numbers."""


# PyYAML is of YAML 1.1, where `1e-3` is a text; in YAML 1.2 it is a number.
for _kind in (UniqueKeyLoader, _Dumper):
    _exponent = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _exponent, list("-+.0123456789"))


def write_yaml(value: Any) -> str:
    """Returns plain values as the text that `read_yaml` reads."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


# ---------------------------------------------------------------------------
# Records as JSON


def to_json(value: Any) -> Any:
    """Returns a record as plain values for JSON.

    Numbers that are not finite become None. Bytes of paths that are not UTF-8 become escapes, so that
    every text can be encoded.

    Args:
        value: A record, or the value of a field.
    """
    if is_dataclass(value):
        content = {}
        for item in fields(value):
            part = getattr(value, item.name)
            is_left_out = part is None and item.metadata.get("optional")
            if not (is_left_out or item.metadata.get("elsewhere")):
                content[item.metadata.get("json", item.name)] = to_json(part)
        return content
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return to_json(value._asdict())  # type: ignore[attr-defined]
    if isinstance(value, Mapping):
        return {to_json(name): to_json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(part) for part in value]

    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def printable(value: Path | str) -> str:
    """Returns a path or text that can be printed: bytes that are not UTF-8 become escapes."""
    return str(value).encode(errors="backslashreplace").decode()
