"""JSON Lines files that grow and survive a kill: metrics, timelines, answers and predictions.

`moe.parsing.read_json_lines` reads them; with `torn_end` while they are written.
"""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from moe.checks import shown
from moe.errors import ConfigError
from moe.files import write_text
from moe.opening import open_to_write
from moe.parsing import printable


class JsonLines:
    """A file of JSON objects, one per line, to which one process appends.

    Opening removes an incomplete last line, which a killed process leaves. A link, a pipe or a device is never written
    to.

    Args:
        path: The file.
        records: Objects that replace an earlier content, whole or not at all; None to keep its lines.

    Raises:
        OSError: When the file cannot be written; names it.
    """

    def __init__(self, path: Path, records: Iterable[Mapping[str, Any]] | None = None) -> None:
        self.path = path
        if records is not None:
            write_text(path, "".join(map(to_line, records)))
            return
        with open(path, "ab+", opener=open_to_write) as file:
            file.seek(0)
            file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))

    def append(self, *records: Mapping[str, Any]) -> None:
        """Adds lines, which have reached the file when this returns; all of them, or none.

        Raises:
            OSError: When the disk is full or fails; names the file.
        """
        lines = "".join(map(to_line, records)).encode()
        with open(self.path, "ab", buffering=0, opener=open_to_write) as file:
            size = file.tell()
            try:
                _write_all(file.fileno(), lines)
            except OSError as error:
                with suppress(OSError):
                    file.truncate(size)
                raise OSError(error.errno, error.strerror, str(self.path)) from error


def check_settings(path: Path, saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raises when the lines of a file were made with other settings than those of this run.

    Raises:
        ConfigError: Names the first setting that differs, and both values.
    """
    for name, value in settings.items():
        if saved.get(name) != value:
            raise ConfigError(
                f"{path} cannot be resumed: it was made with {name} {shown(saved.get(name))}, not {shown(value)}. "
                "Give the same settings, or choose another name."
            )


def to_line(record: Mapping[str, Any]) -> str:
    """Returns the line of an object; values that JSON lacks, e.g. dates, become text."""
    return printable(json.dumps(record, ensure_ascii=False, default=str)) + "\n"


def _write_all(descriptor: int, data: bytes) -> None:
    # A full disk may take only the first bytes before it raises.
    while data:
        data = data[os.write(descriptor, data) :]
