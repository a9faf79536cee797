"""What can be wrong with a file: each function makes one of a valid file, and stands under its name
in DAMAGE.
"""

import gzip
import inspect
import json
import math
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
import yaml

MARKER = "code-of-a-data-file-ran"
"""File that appears in the working folder when a data file's code was run."""

DIGITS = "9" * 5000
NESTED = "[" * 100_000 + "]" * 100_000

# What the files of cases cannot say in YAML, by the name that stands there.
VALUES: dict[str, Any] = {
    "$digits": 10**5000,
    "$nested": {"nested": True},
    "$surrogate": "half a character: \ud800",
    "$nul": "a\0b",
    "$long": "long " * 10_000,
    "$long_name": "long" * 100,
    "$missing": {"missing": True},
}


class _Code:
    """Something whose pickle runs code when it is read."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (MARKER, "w")


def missing(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def half(path: Path) -> None:
    """Leaves the first half, as a copy that was interrupted does."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flipped(path: Path) -> None:
    """Flips one bit in the last quarter."""
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 4
    path.write_bytes(content)


def flipped_first(path: Path) -> None:
    """Flips one bit of the third byte."""
    content = bytearray(path.read_bytes())
    content[2] ^= 64
    path.write_bytes(content)


def binary(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 20)


def not_utf8(path: Path) -> None:
    """Puts a byte of Latin-1 behind the first quotation mark or letter."""
    content = path.read_bytes()
    place = content.find(b'"') + 1 or 1
    path.write_bytes(content[:place] + b"\xe9" + content[place:])


def nul(path: Path) -> None:
    """Fills the file with zeros, as a crash of the file system does."""
    path.write_bytes(bytes(len(path.read_bytes())))


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def pipe(path: Path) -> None:
    """Puts a pipe there that nobody writes to."""
    path.unlink()
    os.mkfifo(path)


def zeros(path: Path) -> None:
    """Puts a link there to a device that never ends."""
    path.unlink()
    path.symlink_to("/dev/zero")


def file(path: Path) -> None:
    """Puts a file where a folder was."""
    shutil.rmtree(path)
    path.write_text("not a folder", encoding="utf-8")


def gone(path: Path) -> None:
    shutil.rmtree(path)


def emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def code(path: Path) -> None:
    """Puts a pickle there that runs code."""
    path.write_bytes(pickle.dumps({"a": _Code()}))


def twice(path: Path) -> None:
    """Writes the content two times."""
    path.write_bytes(path.read_bytes() * 2)


def digits(path: Path) -> None:
    path.write_text(f'{{"text": {DIGITS}}}\n', encoding="utf-8")


def nested(path: Path) -> None:
    path.write_text(NESTED + "\n", encoding="utf-8")


def surrogates(path: Path) -> None:
    path.write_text(
        '{"text": "\\ud800", "inputs": "\\udc00", "targets": "\\ud800"}\n', encoding="utf-8"
    )


def not_a_number(path: Path) -> None:
    path.write_text('{"text": NaN, "a": Infinity}\n', encoding="utf-8")


def a_list(path: Path) -> None:
    path.write_text("[]\n", encoding="utf-8")


def an_object(path: Path) -> None:
    path.write_text("{}\n", encoding="utf-8")


def a_null(path: Path) -> None:
    path.write_text("null\n", encoding="utf-8")


def a_number(path: Path) -> None:
    path.write_text("7\n", encoding="utf-8")


def a_text(path: Path) -> None:
    path.write_text('"text"\n', encoding="utf-8")


def other_letters(path: Path) -> None:
    path.write_text("this is neither JSON nor YAML: [\n\t}", encoding="utf-8")


def repeated_key(path: Path) -> None:
    """Gives a key of a YAML file a second time."""
    text = path.read_text(encoding="utf-8")
    path.write_text(f"{text}\nseed: 1\nseed: 2\n", encoding="utf-8")


def python_tag(path: Path) -> None:
    path.write_text(
        f"seed: !!python/object/apply:builtins.open ['{MARKER}', 'w']\n", encoding="utf-8"
    )


def torch_list(path: Path) -> None:
    torch.save([torch.zeros(2)], path)


def torch_number(path: Path) -> None:
    torch.save(7, path)


def torch_texts(path: Path) -> None:
    torch.save({"shared.weight": "text"}, path)


def torch_nested(path: Path) -> None:
    torch.save({"model": torch.load(path)}, path)


def torch_integers(path: Path) -> None:
    torch.save({name: value.long() for name, value in torch.load(path).items()}, path)


def torch_nan(path: Path) -> None:
    torch.save({name: value * math.nan for name, value in torch.load(path).items()}, path)


def torch_code(path: Path) -> None:
    torch.save({"shared.weight": _Code()}, path)


def gzipped(path: Path) -> None:
    path.write_bytes(gzip.compress(path.read_bytes()))


def utf16(path: Path) -> None:
    path.write_text(path.read_text(encoding="utf-8"), encoding="utf-16")


def quoted(path: Path) -> None:
    """Puts a quotation mark before the last line, which TSV does not have."""
    before, line = path.read_text(encoding="utf-8").rstrip("\n").rsplit("\n", 1)
    path.write_text(f'{before}\n"{line}\n', encoding="utf-8")


def repeated_column(path: Path) -> None:
    """Gives the first column of a table of tabs a second time."""
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text(
        "".join(f"{line.split(chr(9))[0]}\t{line}\n" for line in lines), encoding="utf-8"
    )


def far_dates(path: Path) -> None:
    """Puts dates beyond Python's into the first column of a Parquet file."""
    _first_column(path, pyarrow.timestamp("ms"), 2**60)


def unknown_zone(path: Path) -> None:
    _first_column(path, pyarrow.timestamp("s", tz="No/Zone"), 0)


def _first_column(path: Path, kind: pyarrow.DataType, value: int) -> None:
    table = pyarrow.parquet.read_table(path)
    column = pyarrow.array([value] * len(table)).cast(kind)
    pyarrow.parquet.write_table(table.set_column(0, table.column_names[0], column), path)


def edit(path: Path, key: str, value: Any) -> None:
    """Changes one value of a file of JSON, JSON lines or YAML.

    Args:
        path: The file.
        key: Where it is, e.g. `tasks.0.digest`; in JSON lines the first part is the number of the
            line, from 0.
        value: The new one, or a name in VALUES.
    """
    lines = path.suffix == ".jsonl"
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        content = yaml.safe_load(text)
    else:
        content = [json.loads(line) for line in text.splitlines()] if lines else json.loads(text)

    *outer, last = [int(part) if part.lstrip("-").isdigit() else part for part in key.split(".")]
    place = content
    for part in outer:
        place = place.setdefault(part, {}) if isinstance(place, dict) else place[part]
    if value == "$missing":
        del place[last]
    else:
        place[last] = (
            value if not (isinstance(value, str) and value.startswith("$")) else f"@{value}@"
        )

    if path.suffix == ".yaml":
        text = yaml.safe_dump(content)
    else:
        text = (
            "".join(json.dumps(line) + "\n" for line in content) if lines else json.dumps(content)
        )
    path.write_text(_fill_in(text), encoding="utf-8")


def value_of(value: Any) -> Any:
    """Returns a value of the files of cases: what a `$name` stands for, else the value itself."""
    return VALUES.get(value, value) if isinstance(value, str) else value


def _fill_in(text: str) -> str:
    """Returns a text with the values that its format's own writer refuses."""
    written = {
        "$digits": DIGITS,
        "$nested": NESTED,
        "$surrogate": '"\\ud800"',
        "$nul": '"a\\u0000b"',
        "$long": json.dumps(VALUES["$long"]),
        "$huge": "9" * 309,
        "$hex": f"0x{'f' * 5000}",
        "$nan": "NaN",
        "$inf": "Infinity",
    }
    for name, letters in written.items():
        for quoted in (f'"@{name}@"', f"'@{name}@'", f"@{name}@"):
            text = text.replace(quoted, letters)
    return text


def names_that_are_not_utf8(path: Path) -> None:
    """Adds a file to a folder whose name is no UTF-8."""
    (Path(os.fsdecode(os.fsencode(path) + b"/caf\xe9.txt"))).write_text(
        "The sea is blue.\n", encoding="utf-8"
    )


DAMAGE: dict[str, Callable[[Path], None]] = {
    name: function
    for name, function in globals().items()
    if inspect.isfunction(function) and list(inspect.signature(function).parameters) == ["path"]
}
