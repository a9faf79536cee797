"""python -m eval conformance FILE.json: the library's functions on cases with expected values.

eval/conformance holds what is called for a case.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eval.commands.command import Subparsers
from eval.conformance.case import (
    MAX_TOKENS,
    MAX_TOKENS_REASON,
    CaseFunction,
    CaseFunctions,
    CaseInput,
    Deviation,
    find_function,
)
from eval.conformance.metrics import METRICS
from eval.conformance.postprocessors import POSTPROCESSORS
from eval.conformance.preprocessors import PREPROCESSORS
from moe.checks import check_integer, is_kind
from moe.cli import path
from moe.errors import DataError, did_you_mean
from moe.parsing import read_json

FUNCTIONS: dict[str, CaseFunctions] = {
    "preprocess": PREPROCESSORS,
    "postprocess": POSTPROCESSORS,
    "metric": METRICS,
}
"""What is called, by the kind of a case and the name of its function or task."""

_TOLERANCE = 1e-6
_REQUIRED = ("kind", "task", "input", "expected")
_SIZES = (
    "length",
    "inputs_length",
    "max_length",
    "num_sentinels",
    "extra_ids",
    "base_pieces",
    "num_classes",
)
"""Options that say how much is computed."""


class Outcome(NamedTuple):
    """What running a case gave; both are lines to print.

    Attributes:
        difference: How it differs; None when it agrees.
        note: A deviation from T5 that the library has on purpose; None for none.
    """

    difference: str | None
    note: str | None = None


def add_parser(commands: Subparsers) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "conformance", help="runs the library's functions on cases with expected values"
    )
    parser.add_argument("files", nargs="+", type=path, metavar="FILE.json", help="cases to run")


def run(arguments: argparse.Namespace) -> None:
    """Runs the cases, prints what differs and a count, and exits with 1 when anything differs."""
    num_differing = 0
    for file in arguments.files:
        try:
            cases = read_cases(file)
        except DataError as error:
            print(error)
            num_differing += 1
            continue

        # Differences are printed first, then what differs from T5 on purpose.
        differences: list[str] = []
        notes: list[str] = []
        for number, case in enumerate(cases):
            outcome = check(case, number)
            if outcome.difference is not None:
                differences.append(outcome.difference)
            if outcome.note is not None:
                notes.append(outcome.note)
        for line in [*differences, *notes]:
            print(line)
        print(f"{file}: {len(cases) - len(differences)} of {len(cases)} cases agree.")
        num_differing += len(differences)
    if num_differing:
        sys.exit(1)


def read_cases(file: Path) -> list[Any]:
    """Returns the cases of a file: a list, or a mapping with a list `cases`.

    Raises:
        DataError: When it cannot be read, or holds no cases.
    """
    content = read_json(file, advice="Give a JSON file of cases.", nan=True, pipe=True)
    cases = content.get("cases") if isinstance(content, dict) else content
    if not isinstance(cases, list) or not cases:
        raise DataError(f'{file} has no cases; expected {{"cases": [...]}} with at least one case.')
    return cases


def check(case: Any, number: int = 0) -> Outcome:
    """Runs a case and returns how it differs; it never raises.

    Args:
        case: The content of a file, which may be anything.
        number: What it is called when it has no id.
    """
    # What is no case has no function to call.
    is_mapping = isinstance(case, dict)
    name = str(case.get("id", f"case {number}")) if is_mapping else f"case {number}"
    is_complete = is_mapping and all(key in case for key in _REQUIRED)
    if not is_complete or not isinstance(case["input"], dict):
        return Outcome(
            f"{name}: no case; expected a mapping with kind, task, input (a mapping) and expected."
        )

    try:
        _check_sizes(case["input"])
        function = function_of(case["kind"], case["task"], case["input"])
        value = function(case["input"])
    except Exception as error:  # whatever it is, the other cases are run
        reason = str(error).replace("\n", " ")
        return Outcome(f"{name} ({case['task']}): {type(error).__name__}: {reason}")

    # Where the library has another value on purpose, T5's is compared and the reason noted.
    note = None
    if isinstance(value, Deviation):
        note = f"{name}: agrees with T5, not with this library: {value.reason}"
        value = value.expected
    if agrees(case["expected"], value, subset=case["kind"] == "metric"):
        return Outcome(None, note)
    expected = _on_one_line(case["expected"])
    return Outcome(f"{name} ({case['task']}): expected {expected}, got {_on_one_line(value)}")


def function_of(kind: Any, task: Any, given: CaseInput) -> CaseFunction:
    """Returns what a case is about: the function that its input names, else the one of its task.

    Raises:
        DataError: When none is known.
    """
    if kind not in FUNCTIONS:
        raise DataError(
            f"there is no kind {kind!r}.{did_you_mean(kind, FUNCTIONS)} "
            f"Choose from {', '.join(FUNCTIONS)}."
        )
    name = str(given.get("fn") or given.get("metric") or task)
    return find_function(FUNCTIONS[kind], kind, name)


def agrees(expected: Any, value: Any, *, subset: bool = False) -> bool:
    """Returns whether two values are equal, floats to 1e-6.

    Args:
        expected: A value of the file.
        value: What the library computed; tuples count as lists.
        subset: Whether a computed mapping may have further keys.
    """
    if isinstance(expected, Mapping) and isinstance(value, Mapping):
        missing = set(expected) - set(value)
        further = set(value) - set(expected)
        if missing or (further and not subset):
            return False
        return all(agrees(part, value[key]) for key, part in expected.items())

    if isinstance(expected, list) and isinstance(value, list | tuple):
        return len(expected) == len(value) and all(map(agrees, expected, value))

    if isinstance(expected, int | float) and isinstance(value, int | float):
        return _numbers_agree(expected, value)
    return type(expected) is type(value) and expected == value


def _numbers_agree(expected: float, value: float) -> bool:
    both_nan = expected != expected and value != value
    if expected == value or both_nan:
        return True

    # An integer may be too large for a float.
    are_finite = is_kind(expected, float) and is_kind(value, float)
    return are_finite and abs(expected - value) <= _TOLERANCE


def _check_sizes(given: CaseInput) -> None:
    """Raises a ConfigError when an input asks for more than can be computed while one waits."""
    sizes: CaseInput = {}
    for name in _SIZES:
        if name in given:
            sizes[name] = given[name]
    feature_lengths = given.get("task_feature_lengths")
    if isinstance(feature_lengths, dict) and feature_lengths:
        sizes["max_length"] = max(feature_lengths.values())
    for name, value in sizes.items():
        check_integer(name, value, most=MAX_TOKENS, reason=MAX_TOKENS_REASON, optional="null")


def _on_one_line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
