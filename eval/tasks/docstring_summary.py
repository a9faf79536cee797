"""Docstring body -> summary line: real summaries that every Python installation carries."""

import platform
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from eval.corpora.kept_rows import kept_on_disk
from eval.scores.metrics import ROUGE1, ROUGE2, ROUGELSUM
from eval.source import BuiltIn, split_by_hash
from eval.task import Decoding, Features, Row, Task, register_task
from eval.text.postprocess import unchanged
from eval.text.preprocess import summarize
from moe.data.docstrings import docstrings, package_folder, python_files
from moe.data.prose import letters, prose_paragraphs

PACKAGED_APART = frozenset(
    {"distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtle.py", "turtledemo"}
)
"""Modules that some distributions of Python lack: training only, so that the test split does not depend on them."""

_SPLIT_SALT = "docstring-summary-v1"
_summarize = summarize("body", "summary")


def _rows(split: str) -> list[Row]:
    return _all_rows()[split]


@lru_cache(maxsize=1)
@kept_on_disk("stdlib")
def _all_rows() -> dict[str, list[Row]]:
    """Returns the rows of every split; equal bodies, and equal summaries, occur once."""
    folder = package_folder("stdlib")

    # Training-only rows come last, so that duplicates are removed from them and not from the test
    # split.
    paths = list(python_files(folder))
    paths.sort(key=lambda path: _is_packaged_apart(path.relative_to(folder)))

    splits: dict[str, list[Row]] = {"train": [], "validation": [], "test": []}
    seen: set[str] = set()
    for path in paths:
        relative = path.relative_to(folder)
        for row in _rows_of_file(path, f"stdlib/{relative.as_posix()}"):
            texts = {letters(row["body"]), letters(row["summary"])}
            if seen.isdisjoint(texts):
                seen |= texts
                splits[_split_of_file(relative)].append(row)
    return splits


def _rows_of_file(path: Path, file: str) -> Iterator[Row]:
    """Yields the rows of a source file.

    A docstring gives an example if it has a summary line, a blank line and a longer body, as PEP
    257 asks for.
    """
    for number, docstring in enumerate(docstrings(path), start=1):
        first_line, _, rest = docstring.partition("\n")
        second_line, _, rest = rest.partition("\n")
        summary = " ".join(prose_paragraphs(first_line))
        body = " ".join(prose_paragraphs(rest))

        is_longer = len(body.split()) > len(summary.split())
        if summary and not second_line.strip() and is_longer:
            yield {"id": f"{file}#{number}", "file": file, "body": body, "summary": summary}


def _split_of_file(relative: Path) -> str:
    """Returns the split of a file; it depends on its name alone."""
    if _is_packaged_apart(relative):
        return "train"
    return split_by_hash(f"{_SPLIT_SALT}/{relative.as_posix()}", test=0.20, validation=0.05)


def _is_packaged_apart(relative: Path) -> bool:
    return relative.parts[0] in PACKAGED_APART


def _preprocess(row: Row) -> list[Features]:
    return [{**row, **features} for features in _summarize(row)]


register_task(
    Task(
        name="docstring_summary",
        version=1,
        description=(
            "Given a docstring's prose below its summary line, write that line. Docstrings are from "
            f"Python {platform.python_version()}'s standard library; equal bodies and equal "
            "summaries occur once. The split is by file; modules that some distributions package "
            "separately, such as tkinter, are in the training split only."
        ),
        licence="PSF-2.0",
        source=BuiltIn(_rows),
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
    )
)
