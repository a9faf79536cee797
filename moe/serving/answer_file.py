"""Requests and answers as JSONL; a run that was killed continues where its file ends."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

from moe.checks import shown
from moe.errors import ConfigError, DataError, MoEError, did_you_mean
from moe.parsing import parse_json
from moe.serving.batch_generator import Item, Request
from moe.serving.engine import Answer
from moe.serving.sampling import Sampling
from moe.work_folder import work_folder

_ADVICE = 'Expected an object like {"inputs": "..."} a line.'

_SETTINGS = ".settings.json"
"""Ending of the file beside the answers that holds the settings of the run."""


def parse_request(number: int, line: str, defaults: Sampling) -> tuple[dict[str, Any], Item]:
    """Returns the object of a line, and its request or the error that refuses it.

    Args:
        number: Number of the line.
        line: JSON with `inputs`, and `sampling` with fields of Sampling if it needs its own.
        defaults: Settings that the line does not have.
    """
    where = f"line {number}"
    record: dict[str, Any] = {}
    try:
        value = parse_json(line, where=where, advice=_ADVICE, nan=True)
        if not isinstance(value, dict):
            raise DataError(f"{where}: {shown(line[:60])} is not a JSON object. {_ADVICE}")
        record = value
        if not isinstance(record.get("inputs"), str):
            text = shown(record["inputs"]) if "inputs" in record else "missing"
            raise DataError(f"{where}: inputs is {text}. {_ADVICE}")
        if not record["inputs"].strip():
            raise DataError(f"{where}: inputs is empty. Give a text, or leave the line out.")
        return record, Request(record["inputs"], _sampling(record, defaults))
    except MoEError as error:
        return record, DataError(with_line(number, str(error)))


def with_line(number: int, message: str) -> str:
    """Returns a message that begins with the number of its line."""
    return message if message.startswith("line ") else f"line {number}: {message}"


def _sampling(record: dict[str, Any], defaults: Sampling) -> Sampling | None:
    """Returns the settings of a line; None for the defaults."""
    sampling = record.get("sampling")
    if sampling is None:
        return None
    names = [field.name for field in fields(Sampling)]
    if not isinstance(sampling, dict):
        raise DataError(
            f"sampling is {shown(sampling)}; expected an object with {', '.join(names)}."
        )
    for name in sampling:
        if name not in names:
            raise DataError(
                f"sampling has {shown(name)}; expected {', '.join(names)}.{did_you_mean(name, names)}"
            )
    if isinstance(sampling.get("stop"), list):
        sampling = {**sampling, "stop": tuple(sampling["stop"])}
    return Sampling(**{**vars(defaults), **sampling})


def answer_record(line: int, record: dict[str, Any], answer: Answer) -> dict[str, Any]:
    """Returns the object that is written for an answer.

    It has the keys of the request; what the request had as `targets` becomes `references`.
    """
    result: dict[str, Any] = {"line": line, **record}
    if "targets" in result:
        result["references"] = result.pop("targets")
    if answer.error is not None:
        return {**result, "error": with_line(line, answer.error)}
    result |= {"targets": answer.text, "finish": answer.finish}
    if answer.log_probs:
        result["log_probs"] = answer.log_probs
    return result


class AnswerFile:
    """A JSONL file with one line for each request, in their order.

    Attributes:
        last: Its last record when it was opened; None if there was none.
    """

    def __init__(self, file: BinaryIO, last: dict[str, Any] | None) -> None:
        self._file = file
        self.last = last

    def append(self, record: dict[str, Any]) -> None:
        """Adds the next line."""
        line = json.dumps(record, ensure_ascii=False) + "\n"
        self._file.write(line.encode("utf-8", errors="backslashreplace"))
        self._file.flush()


@contextmanager
def open_answers(path: Path, settings: dict[str, Any], *, resume: bool) -> Iterator[AnswerFile]:
    """Opens the file of a run, which no other process then writes.

    Args:
        path: The file.
        settings: Settings that determine the answers, besides the requests; JSON values.
        resume: Whether to continue a file that exists, or else to begin one.

    Raises:
        ConfigError: When the file exists and is not to be continued, or was written with other
            settings.
        DataError: When another process writes it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with work_folder(path, wait=False):
        if path.exists():
            if not resume:
                raise ConfigError(
                    f"--out {path} exists. Add --resume to continue it, or choose another name."
                )
            _check_settings(path, settings)
        else:
            settings_path = path.with_name(path.name + _SETTINGS)
            settings_path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        try:
            with path.open("ab+") as file:
                line = _drop_torn_line(file)
                last = parse_json(line, where=f"{path}, last line") if line else None
                yield AnswerFile(file, last)
        except (KeyboardInterrupt, OSError) as error:
            error.add_note("The same command with --resume continues after the last answer.")
            raise


def _check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Raises a ConfigError unless the answers of a file were made with these settings."""
    settings_path = path.with_name(path.name + _SETTINGS)
    if not settings_path.is_file():
        raise ConfigError(
            f"{path} cannot be resumed: {settings_path} is missing, which holds the settings of its "
            "run. Choose another name."
        )
    text = settings_path.read_text(encoding="utf-8")
    saved = parse_json(text, where=str(settings_path), advice="Choose another name.")
    for name, value in settings.items():
        earlier = saved.get(name) if isinstance(saved, dict) else None
        if earlier != value:
            raise ConfigError(
                f"{path} cannot be resumed: its answers were made with {name} {shown(earlier)}, not "
                f"{shown(value)}. Give the same settings, or choose another name."
            )


def _drop_torn_line(file: BinaryIO) -> str:
    """Returns the last whole line of a file, and cuts off what follows it."""
    file.seek(0)
    last = b""
    whole = 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        last = line
        whole += len(line)
    file.truncate(whole)
    file.seek(0, 2)
    return last.decode()
