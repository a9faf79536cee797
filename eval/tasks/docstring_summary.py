"""Docstring body -> summary line: real summaries that every Python installation carries."""

import hashlib
import platform
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from eval.scores.metrics import ROUGE1, ROUGE2, ROUGELSUM
from eval.source import BuiltIn
from eval.task import TASKS, Decoding, Row, Task
from eval.text.postprocess import unchanged
from eval.text.preprocess import summarize
from moe.data.docstrings import docstrings, package_folder, python_files
from moe.data.prose import prose_paragraphs

PACKAGED_APART = frozenset(
    {"distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtle.py", "turtledemo"}
)
"""What some distributions leave out of Python: for training only, so that the test split is the same without it."""

_summarize = summarize("body", "summary")
_SPLIT_SALT = "docstring-summary-v1"
_SHARES = (("test", 0.20), ("validation", 0.25))


@lru_cache(maxsize=1)
def _all_rows() -> dict[str, list[Row]]:
    """Returns the rows of every split; of equal bodies, and of equal summaries, the first alone
    stays.
    """
    folder, seen = package_folder("stdlib"), set()
    splits: dict[str, list[Row]] = {"train": [], "validation": [], "test": []}
    for path in sorted(python_files(folder), key=lambda path: _is_apart(path.relative_to(folder))):
        name = path.relative_to(folder)
        split = "train" if _is_apart(name) else _split_of(name.as_posix())
        for row in _rows_of(path, f"stdlib/{name.as_posix()}"):
            keys = {_letters(row["body"]), _letters(row["summary"])}
            if seen.isdisjoint(keys):
                seen |= keys
                splits[split].append(row)
    return splits


def _rows_of(path: Path, file: str) -> Iterator[Row]:
    """Yields the rows of a source file: a summary line, a blank line and a longer body, as PEP 257
    asks for.
    """
    for number, docstring in enumerate(docstrings(path), start=1):
        line, _, rest = docstring.partition("\n")
        blank, _, rest = rest.partition("\n")
        summary, body = " ".join(prose_paragraphs(line)), " ".join(prose_paragraphs(rest))
        if summary and not blank.strip() and len(body.split()) > len(summary.split()):
            yield {"id": f"{file}#{number}", "file": file, "body": body, "summary": summary}


def _preprocess(row: Row) -> list[dict[str, Any]]:
    """Returns the example of one docstring, in T5's form."""
    return [{**row, **example} for example in _summarize(row)]


def _is_apart(name: Path) -> bool:
    """Returns whether some distributions leave a file out."""
    return name.parts[0] in PACKAGED_APART


def _letters(text: str) -> str:
    """Returns what is left of `text` without case, spaces and punctuation."""
    return "".join(filter(str.isalnum, text.casefold()))


def _split_of(name: str) -> str:
    """Returns the split of a file; it depends on its name alone."""
    digest = hashlib.sha256(f"{_SPLIT_SALT}/{name}".encode()).digest()
    place = int.from_bytes(digest[:6], "big") / 2**48
    return next((split for split, share in _SHARES if place < share), "train")


TASKS.add(
    "docstring_summary",
    Task(
        name="docstring_summary",
        version=1,
        description=(
            "The prose of a docstring below its summary line to that line, from the source files of Python "
            f"{platform.python_version()}'s standard library. Equal bodies and equal summaries occur once. Split by "
            "file; what some distributions package apart, such as tkinter, is for training only."
        ),
        licence="PSF-2.0",
        source=BuiltIn(lambda split: _all_rows()[split]),
        preprocess=_preprocess,
        postprocess=unchanged,
        metrics=(ROUGE1, ROUGE2, ROUGELSUM),
        ids=("id",),
        groups=("file",),
        inputs_length=128,
        targets_length=32,
        decoding=Decoding(max_tokens=32, num_beams=4, alpha=0.6),  # T5's of summaries
        split="test",
        prompt_source="T5",
    ),
)
