"""Message of a `raise` statement -> the class of its exception, a task that pre-training can help.

The messages are in the source code of installed packages, but not in their docstrings, from which
the text of the demo and the studies is made.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from eval.corpora.kept_rows import kept_on_disk
from eval.scores.metrics import ACCURACY
from eval.source import BuiltIn, hash_fraction, split_by_hash
from eval.task import SPLITS, Decoding, Features, Row, Task, register_task
from eval.text.postprocess import label_index
from moe.data.docstrings import garbage_collector_paused, package_folder, parse_source, python_files
from moe.data.prose import letters

PACKAGES = ("stdlib", "torch", "numpy", "scipy", "transformers", "datasets", "huggingface_hub")
"""Dependencies of this library, and the standard library."""

CLASSES = {
    "AssertionError": "assertion",
    "AttributeError": "attribute",
    "FileNotFoundError": "file not found",
    "ImportError": "import",
    "IndexError": "index",
    "KeyError": "key",
    "LinAlgError": "linear algebra",
    "NotImplementedError": "not implemented",
    "OSError": "operating system",
    "RuntimeError": "runtime",
    "TypeError": "type",
    "ValueError": "value",
}
"""Exceptions of Python and NumPy that many files raise, so that every split has some, and their names in words."""

MAX_MESSAGES_PER_CLASS = 600
MAX_WORDS = 60
MIN_WORDS = 3

_SPLIT_SALT = "raised-exception-v1"


def _rows(split: str) -> list[Row]:
    return _all_rows()[split]


@lru_cache(maxsize=1)
@kept_on_disk(*PACKAGES)
def _all_rows() -> dict[str, list[Row]]:
    """Returns the rows of every split; equal messages occur once."""
    rows_by_class: dict[str, list[Row]] = defaultdict(list)
    seen: set[str] = set()
    with garbage_collector_paused():
        for package in PACKAGES:
            folder = package_folder(package)
            for path in python_files(folder):
                file = f"{package}/{path.relative_to(folder).as_posix()}"
                for row in _rows_of_file(path, file):
                    key = letters(row["message"])
                    if key not in seen:
                        seen.add(key)
                        rows_by_class[row["exception"]].append(row)

    splits: dict[str, list[Row]] = {split: [] for split in SPLITS}
    for exception in CLASSES:
        # The same random messages of a large class on every machine with these packages.
        chosen = sorted(rows_by_class[exception], key=_order)[:MAX_MESSAGES_PER_CLASS]
        for row in chosen:
            split = split_by_hash(f"{_SPLIT_SALT}/{row['file']}", test=0.2, validation=0.08)
            splits[split].append(row)
    return splits


def _order(row: Row) -> float:
    return hash_fraction(f"{_SPLIT_SALT}/order/{row['id']}")


def _rows_of_file(path: Path, file: str) -> Iterator[Row]:
    """Yields a row for each `raise` of a known class with a message in words."""
    source = path.read_bytes()
    tree = parse_source(source, path) if b"raise " in source else None
    for node in ast.walk(tree) if tree else ():
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
            continue
        name = ast.unparse(node.exc.func).rpartition(".")[2]
        if name not in CLASSES or not node.exc.args:
            continue

        # A message that names its class would give the answer away.
        words = _message(node.exc.args[0]).split()[:MAX_WORDS]
        message = " ".join(words).replace(name, "_")
        if len(words) >= MIN_WORDS:
            row_id = f"{file}#{node.lineno}"
            yield {"id": row_id, "file": file, "message": message, "exception": name}


def _message(node: ast.expr) -> str:
    """Returns the text of a message, with `_` for each inserted value; empty if it has no text."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_message(part) or "_" for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (_message(left) or "_") + (_message(right) or "_")
        case ast.BinOp(left=left, op=ast.Mod()):
            return _message(left)
        case ast.Call(func=ast.Attribute(value=template, attr="format")):
            return _message(template)
    return ""


def _preprocess(row: Row) -> list[Features]:
    return [
        {
            **row,
            "inputs": f"exception with message: {row['message']}",
            "targets": CLASSES[row["exception"]],
        }
    ]


_CHOICES = tuple(CLASSES.values())

register_task(
    Task(
        name="raised_exception",
        version=1,
        description=(
            f"The message of a `raise` statement to the class of its exception, one of {len(CLASSES)} in "
            f"words. From the source files of {', '.join(PACKAGES)} that are installed; at most "
            f"{MAX_MESSAGES_PER_CLASS} messages a class, each once. The split is by file."
        ),
        licence="PSF-2.0, BSD-3-Clause and Apache-2.0",
        source=BuiltIn(_rows),
        preprocess=_preprocess,
        postprocess=label_index(_CHOICES),
        metrics=(ACCURACY,),
        choices=_CHOICES,
        ids=("id",),
        groups=("file",),
        inputs_length=128,
        targets_length=16,
        decoding=Decoding(max_tokens=16),
        split="test",
        prompt_source="this library",
    )
)
