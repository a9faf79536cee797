"""What the rows of a dataset have to look like, and what is said of those that do not.

A kind is `str` or `int`, `[kind]` for a list, or `{name: kind}` for a struct. A struct of lists may
also come as a list
of structs: mirrors of the same dataset differ in that, and both become a struct of lists.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from moe import DataError

Columns = Mapping[str, Any]
"""Kinds by column."""

HIDDEN = (-1, "")
"""What stands for a label that the authors of a dataset keep to themselves."""

_WORDS = {str: "text", int: "whole number"}
_SHOWN = 60
_SURROGATE = re.compile("[\ud800-\udfff]")


def require_columns(names: Iterable[str], columns: Columns, where: str) -> None:
    """Refuses rows that lack a column.

    Raises:
        DataError: With the names that there are and those that are expected.
    """
    names = list(names)
    missing = [name for name in columns if name not in names]
    if missing:
        raise DataError(
            f"{where} has no column {missing[0]!r}; its columns are {', '.join(names) or 'none'}. "
            f"Expected {describe(columns)}. Rename or add the column."
        )


def fit_row(row: Any, columns: Columns, where: str) -> dict[str, Any]:
    """Returns the expected columns of a row, without others.

    Raises:
        DataError: When a column is missing, or a value is of another kind.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{where} is {_show(row)}. Expected an object with {describe(columns)}.")
    require_columns(row, columns, where)
    return {name: _fit(row[name], kind, name, where) for name, kind in columns.items()}


def require_label(
    value: Any, allowed: Collection[Any], column: str, where: str, *, hidden: bool
) -> None:
    """Refuses a label out of range.

    Args:
        value: The label.
        allowed: Those that there are.
        column: Its column.
        where: The row, in words.
        hidden: Whether the split may hide its labels.

    Raises:
        DataError: When the value is none of the allowed.
    """
    if value in allowed or (hidden and value in HIDDEN):
        return
    raise DataError(
        f"{where} has {column} {_show(value)}. Expected one of {', '.join(map(repr, allowed))}"
        + (f", or {' or '.join(map(repr, HIDDEN))} for a hidden one. " if hidden else ". ")
        + "Map your labels to those of the hub's dataset, and take rows with a hidden label out of this split."
    )


def describe(columns: Columns) -> str:
    """Returns columns and their kinds in words: `question (text), answers ({text: list of text})`."""
    return ", ".join(f"{name} ({_words(kind)})" for name, kind in columns.items())


def _fit(value: Any, kind: Any, column: str, where: str) -> Any:
    """Returns a value of `kind`, or refuses it."""
    if isinstance(kind, Mapping):
        if isinstance(value, list) and all(isinstance(part, list) for part in kind.values()):
            items = [
                fit_row(item, {name: part[0] for name, part in kind.items()}, where)
                for item in value
            ]
            return {name: [item[name] for item in items] for name in kind}
        if isinstance(value, Mapping):
            require_columns(value, kind, f"{column} of {_lower_first(where)}")
            return {
                name: _fit(value[name], part, f"{column}.{name}", where)
                for name, part in kind.items()
            }
    elif isinstance(kind, list):
        if isinstance(value, list):
            return [_fit(item, kind[0], column, where) for item in value]
    elif isinstance(value, kind) and not isinstance(value, bool):
        if isinstance(value, str) and not value.isascii() and _SURROGATE.search(value):
            raise DataError(
                f"{where} has in {column!r} half a character: {_show(value)}. Expected text without lone surrogates, "
                "\\ud800 to \\udfff. Write the character whole, or leave the row out."
            )
        return value
    raise DataError(
        f"{where} has in {column!r} {_show(value)} ({type(value).__name__}). Expected {_words(kind)}, as in the hub's "
        "dataset. Change the value, or leave the row out."
    )


def _words(kind: Any) -> str:
    """Returns a kind in words."""
    if isinstance(kind, Mapping):
        return "{" + ", ".join(f"{name}: {_words(part)}" for name, part in kind.items()) + "}"
    return f"list of {_words(kind[0])}" if isinstance(kind, list) else _WORDS[kind]


def _show(value: Any) -> str:
    """Returns a value as it is written, cut when it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _lower_first(text: str) -> str:
    """Returns `text` with a small first letter, unless it begins with a path or a name."""
    return text[0].lower() + text[1:] if text.startswith(("Row ", "Line ")) else text
