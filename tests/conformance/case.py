"""A case with an expected value, and how its function is found in a table.

A case has an `id`, a `kind` (preprocess, postprocess, metric), a `task`, an `input` and an
`expected` value, which T5, t5_cbqa or seqio computed.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

CaseInput = dict[str, Any]
"""The input of a case: arguments of a function of T5, by name, as JSON holds them."""

CaseFunction = Callable[[CaseInput], Any]
CaseFunctions = Mapping[str, CaseFunction]
"""What is called, by the name of a function or task."""


class Deviation(NamedTuple):
    """A value on which this library departs from T5 on purpose.

    Attributes:
        expected: T5's value.
        reason: Why the library has another.
    """

    expected: Any
    reason: str


def find_function(functions: CaseFunctions, name: str) -> CaseFunction:
    """Returns the function whose name is `name`, or the first words of it joined by underscores.

    `super_glue/cb (validation)` also stands for `cb`; upper and lower case are alike.
    """
    by_lower_name = {known.lower(): function for known, function in functions.items()}
    name = name.lower()
    spellings = [name]
    for part in (name, name.partition("/")[2]):
        words = re.findall(r"[\w./]+", part)
        spellings += ["_".join(words[:count]) for count in range(len(words), 0, -1)]
    return next(by_lower_name[spelling] for spelling in spellings if spelling in by_lower_name)
