"""The schema of the rows of a dataset, and messages about rows that do not match it.

A kind is `str`, `int` or `float`, `[kind]` for a list, or `{name: kind}` for a struct. A struct of
lists may also come as a list of structs: mirrors of the same dataset differ here, and both become a
struct of lists.
"""

import re
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from moe.errors import DataError

ColumnKinds = Mapping[str, Any]
"""The kind of each column that is read."""

HIDDEN_LABELS = (-1, "")
"""Placeholder for a label that the authors of a dataset keep secret."""

_KIND_NAMES = {str: "text", int: "whole number", float: "number"}
_MAX_SHOWN = 60  # characters of a value in a message
_SURROGATE = re.compile("[\ud800-\udfff]")


class Interval(NamedTuple):
    """All numbers from one to another, which a label may have."""

    least: float
    most: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.least <= value <= self.most


LabelValues = Collection[Any] | Interval
"""The values that a label may have."""


def require_columns(names: Iterable[str], columns: ColumnKinds, where: str) -> None:
    """Raises when rows lack a column.

    Args:
        names: Columns of the rows.
        columns: Columns that are read.
        where: Description of the rows.

    Raises:
        DataError: When one is missing; names the columns of the rows and the expected ones.
    """
    names = list(names)
    for name in columns:
        if name not in names:
            raise DataError(
                f"{where} has no column {name!r}; its columns are {', '.join(names) or 'none'}. "
                f"Expected {format_columns(columns)}. Rename or add the column."
            )


def fit_row(row: Any, columns: ColumnKinds, where: str) -> dict[str, Any]:
    """Returns the columns of a row that are read, without others.

    Args:
        row: Row of a file.
        columns: Columns that are read.
        where: Description of the row.

    Raises:
        DataError: When a column is missing, or a value has another type.
    """
    if not isinstance(row, Mapping):
        raise DataError(
            f"{where} is {_show(row)}. Expected an object with {format_columns(columns)}."
        )
    require_columns(row, columns, where)

    fitted: dict[str, Any] = {}
    for name, kind in columns.items():
        fitted[name] = _fit_value(row[name], kind, name, where)
    return fitted


def require_label(
    value: Any, allowed: LabelValues, column: str, where: str, *, hidden: bool
) -> None:
    """Raises when a label is out of range.

    Args:
        value: The label.
        allowed: Labels that the dataset has.
        column: Column of the label.
        where: Description of the row.
        hidden: Whether the split may hide its labels.

    Raises:
        DataError: When the value is not allowed.
    """
    if value in allowed or (hidden and value in HIDDEN_LABELS):
        return

    expected = f"one of {', '.join(map(repr, allowed))}"
    if isinstance(allowed, Interval):
        expected = f"a number from {allowed.least:g} to {allowed.most:g}"
    if hidden:
        expected += f", or {' or '.join(map(repr, HIDDEN_LABELS))} for a hidden one"
    raise DataError(
        f"{where} has {column} {_show(value)}. Expected {expected}. Map your labels to those "
        "of the hub's dataset, and take rows with a hidden label out of this split."
    )


def _fit_value(value: Any, kind: Any, column: str, where: str) -> Any:
    """Returns a value of a kind, or raises a DataError."""
    # A struct, in either form.
    if isinstance(kind, Mapping):
        if isinstance(value, Mapping):
            return _fit_struct(value, kind, column, where)
        if isinstance(value, list) and all(isinstance(part, list) for part in kind.values()):
            return _fit_list_of_structs(value, kind, where)

    # A list whose items have the type.
    elif isinstance(kind, list):
        if isinstance(value, list):
            return [_fit_value(item, kind[0], column, where) for item in value]

    # A number with or without a point, neither NaN nor infinite.
    elif kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and abs(value) <= sys.float_info.max:
            return float(value)

    # Text or a whole number; Python's bool is an int too.
    elif isinstance(value, kind) and not isinstance(value, bool):
        if isinstance(value, str):
            _refuse_half_characters(value, column, where)
        return value

    raise DataError(
        f"{where} has in {column!r} {_show(value)} ({type(value).__name__}). Expected "
        f"{_format_kind(kind)}, as in the hub's dataset. Change the value, or leave the row out."
    )


def _fit_struct(
    value: Mapping[str, Any], kind: ColumnKinds, column: str, where: str
) -> dict[str, Any]:
    require_columns(value, kind, f"{column} of {_lower_first(where)}")
    fitted: dict[str, Any] = {}
    for name, part in kind.items():
        fitted[name] = _fit_value(value[name], part, f"{column}.{name}", where)
    return fitted


def _fit_list_of_structs(value: list[Any], kind: ColumnKinds, where: str) -> dict[str, list[Any]]:
    """Returns a list of structs as a struct of lists."""
    item_kind = {name: part[0] for name, part in kind.items()}
    fitted: dict[str, list[Any]] = {name: [] for name in kind}
    for item in value:
        for name, part in fit_row(item, item_kind, where).items():
            fitted[name].append(part)
    return fitted


def _refuse_half_characters(text: str, column: str, where: str) -> None:
    """Raises a DataError when a text has a lone surrogate, which no file can hold."""
    if not text.isascii() and _SURROGATE.search(text):
        raise DataError(
            f"{where} has in {column!r} half a character: {_show(text)}. Expected text without lone "
            "surrogates, \\ud800 to \\udfff. Write the character whole, or leave the row out."
        )


def format_columns(columns: ColumnKinds) -> str:
    """Returns columns and their kinds: `question (text), answers ({text: list of text})`."""
    return ", ".join(f"{name} ({_format_kind(kind)})" for name, kind in columns.items())


def _format_kind(kind: Any) -> str:
    if isinstance(kind, Mapping):
        parts = ", ".join(f"{name}: {_format_kind(part)}" for name, part in kind.items())
        return "{" + parts + "}"
    if isinstance(kind, list):
        return f"list of {_format_kind(kind[0])}"
    return _KIND_NAMES[kind]


def _show(value: Any) -> str:
    """Returns a value as written, truncated if long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _lower_first(text: str) -> str:
    """Returns a text with a small first letter, unless it begins with a path or a name."""
    if text.startswith(("Row ", "Line ")):
        return text[0].lower() + text[1:]
    return text
