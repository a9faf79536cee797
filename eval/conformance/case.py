"""A case of `python -m eval conformance`, and how its function is found in a table.

A case has an `id`, a `kind` (preprocess, postprocess, metric), a `task`, an `input` and an
`expected` value, all of a JSON file that was made with T5, t5_cbqa or seqio.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from moe.errors import DataError, did_you_mean

CaseInput = dict[str, Any]
"""The input of a case: arguments of a function of T5, by name, as JSON holds them."""

CaseFunction = Callable[[CaseInput], Any]
CaseFunctions = Mapping[str, CaseFunction]
"""What is called, by the name of a function or task."""

MAX_TOKENS = 1 << 16
"""Most tokens, classes or pieces of a case; more cannot be computed while one waits."""

MAX_TOKENS_REASON = "a case is computed token by token"

_MAX_WORDS = 20  # of the name of a function


class Deviation(NamedTuple):
    """A value on which this library departs from T5 on purpose.

    Attributes:
        expected: T5's value.
        reason: Why the library has another.
    """

    expected: Any
    reason: str


def find_function(functions: CaseFunctions, kind: str, name: str) -> CaseFunction:
    """Returns the function of a name; its case and what stands behind it do not matter.

    Raises:
        DataError: When none is known.
    """
    by_lower_name: dict[str, CaseFunction] = {}
    for known, function in functions.items():
        by_lower_name[known.lower()] = function

    # The most that the name may stand for comes first.
    for spelling in _spellings(name.lower()):
        if spelling in by_lower_name:
            return by_lower_name[spelling]
    raise DataError(f"no function for {kind} {name!r}.{did_you_mean(name, functions)}")


def _spellings(name: str) -> list[str]:
    """Returns what a name may stand for, the longest first.

    These are the name, its first words joined by underscores, and those of what follows its slash:
    `super_glue/cb (validation)` stands for `cb` too.
    """
    spellings = [name]
    for part in (name, name.partition("/")[2]):
        words = re.findall(r"[\w./]+", part)[:_MAX_WORDS]
        for num_words in range(len(words), 0, -1):
            spellings.append("_".join(words[:num_words]))
    return spellings
