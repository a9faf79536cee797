"""python -m tests.doors.racer WORKSPACE FOLDER NUMBER: one of two processes that run the same
commands at once.
"""

import json
import sys
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import stmoe
from moe.errors import MoEError

_PATIENCE = 120

# Each with what differs between the two, so that a mixture of both could be told from either.
ROUNDS = {
    "corpus": ("corpus --data {texts} --out {out} --held-out 0.2 --seed", ("1", "2")),
    "tokenizer": ("tokenizer --corpus {corpus} --out {out} --vocab-size", ("230", "240")),
    "run": (
        "pretrain --config {pretrain.yaml} --corpus {corpus} --tokenizer {tokenizer} --out {out} "
        "--training.steps 2 --seed",
        ("1", "2"),
    ),
    "model": (
        "convert --from {switch} --to {out} --set capacity_factor=1.5 --dtype",
        ("float32",) * 2,
    ),
    "evaluation": (
        "eval run --model {run/model} --tasks copa --data {rows} --out {out} --limit",
        ("5", "2"),
    ),
    "comparison": (
        "eval compare {evaluations/first} {evaluations/second} --tasks copa --out {out} --mode",
        ("rank", "rank"),
    ),
    "report.html": (
        "inspect report --model {run/model} --corpus {corpus} --out {out} --examples",
        ("1", "2"),
    ),
}


def main(workspace: Path, folder: Path, number: int) -> None:
    """Runs every round and writes how each ended to results-NUMBER.json."""
    warnings.simplefilter("ignore")
    results = {}
    for name, (text, differing) in ROUNDS.items():
        words = f"{text} {differing[number]}".split()
        argv = [str(folder / name) if word == "{out}" else _fill(word, workspace) for word in words]
        _meet(folder, name, number)
        results[name] = _end_of(argv)
    (folder / f"results-{number}.json").write_text(json.dumps(results))


def _fill(word: str, workspace: Path) -> str:
    """Returns a word of a command line, with the path of the thing that stands in braces."""
    return str(workspace / word[1:-1]) if word.startswith("{") else word


def _meet(folder: Path, name: str, number: int) -> None:
    """Waits until both processes are here."""
    (folder / f".at-{name}-{number}").touch()
    end = time.monotonic() + _PATIENCE
    while not (folder / f".at-{name}-{1 - number}").exists():
        assert time.monotonic() < end, f"the other process did not come to {name}"
        time.sleep(0.001)


def _end_of(argv: list[str]) -> str:
    """Returns `done`, or the message with which a command was refused."""
    said = StringIO()
    try:
        with redirect_stdout(StringIO()), redirect_stderr(said):
            stmoe.main(argv)
    except (MoEError, OSError) as error:
        return str(error)
    except SystemExit as end:
        return "done" if not end.code else said.getvalue()
    except Exception as error:
        return f"TRACEBACK {type(error).__name__}: {error}"
    return "done"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
