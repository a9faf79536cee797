"""Answers as JSONL, beside request_file.py; a run that was killed continues where its file ends."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe.checks import shown
from moe.errors import ConfigError
from moe.files import work_folder, write_text
from moe.json_lines import JsonLines, check_settings, to_line
from moe.parsing import read_json
from moe.serving.engine import Answer
from moe.serving.request_file import Line

_SETTINGS = ".settings.json"
"""Ending of the file beside the answers that holds the settings of the run."""

_ADVICE = "Choose another name for the answers."

_NAMES = ("line", "targets", "finish", "log_probs", "error", "request")
"""Keys of an answer, besides those of its request."""


def with_line(number: int, message: str) -> str:
    """Returns a message that begins with the number of its line."""
    return message if message.startswith("line ") else f"line {number}: {message}"


def answer_record(number: int, record: dict[str, Any], answer: Answer) -> dict[str, Any]:
    """Returns the object that is written for an answer: `request_record`, then the answer."""
    result = request_record(number, record)
    if answer.error is not None:
        return {**result, "error": with_line(number, answer.error)}
    result |= {"targets": answer.text, "finish": answer.finish}
    if answer.log_probs:
        result["log_probs"] = answer.log_probs
    return result


def request_record(number: int, record: dict[str, Any]) -> dict[str, Any]:
    """Returns the number of a line, and the keys of its request.

    What the request had as `targets` becomes `references`, and what it had under another name of
    ours is in `request`.
    """
    kept = dict(record)
    references = {"references": kept.pop("targets")} if "targets" in kept else {}
    renamed = {name: kept.pop(name) for name in (*_NAMES, *references) if name in kept}
    if renamed:
        kept["request"] = renamed
    return {"line": number, **kept, **references}


class AnswerFile(JsonLines):
    """A JSONL file with one line for each request, in their order."""

    def skip_answered(self, lines: Iterator[Line]) -> int:
        """Takes the requests with an answer from `lines`.

        Returns:
            The number of the last one, 0 if there is none.

        Raises:
            ConfigError: When an answer is not to the request in its place.
        """
        last = 0
        with self.path.open("rb") as file:
            for answered in file:
                number, record, _ = next(lines, (last + 1, {}, None))
                request = to_line(request_record(number, record)).encode().removesuffix(b"}\n")
                if not answered.startswith((request + b', "targets": ', request + b', "error": ')):
                    raise ConfigError(
                        f"{self.path} cannot be resumed: {shown(answered)} does not answer line {number}, "
                        f"{shown(record)}. Give the same requests, or choose another name."
                    )
                last = number
        return last


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
        if path.exists() and not resume:
            raise ConfigError(
                f"--out {path} exists. Add --resume to continue it, or choose another name."
            )
        _keep_settings(path, settings)
        try:
            yield AnswerFile(path)
        except (KeyboardInterrupt, OSError) as error:
            error.add_note("The same command with --resume continues after the last answer.")
            raise


def _keep_settings(path: Path, settings: dict[str, Any]) -> None:
    """Writes the settings of new answers beside them, or compares them with those of earlier ones.

    Raises:
        ConfigError: When the earlier ones differ, or the file beside the answers is something else.
    """
    settings_path = path.with_name(path.name + _SETTINGS)
    exists = path.exists()
    if exists or os.path.lexists(settings_path):
        saved = read_json(settings_path, advice=_ADVICE, error=ConfigError)
        if not isinstance(saved, dict) or saved.keys() != settings.keys():
            raise ConfigError(
                f"{settings_path} holds {shown(saved)}; expected the settings of a run. {_ADVICE}"
            )
        if exists:
            check_settings(path, saved, settings)
    if not exists:
        write_text(settings_path, json.dumps(settings, indent=2) + "\n")
