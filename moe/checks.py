"""Checks of settings, with one form of message: the name, the value, the expectation, and why."""

import inspect
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from moe.errors import ConfigError

_SHOWN_CHARACTERS = 80
_TYPE_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a finite number",
    str: "a string",
    dict: "a mapping",
}
_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "of at least": operator.ge,
    "above": operator.gt,
    "of at most": operator.le,
    "below": operator.lt,
}


def check(holds: bool, name: str, value: object, expected: str) -> None:
    """Raises unless a setting holds.

    Args:
        holds: The condition.
        name: Name of the setting, as the user writes it.
        value: Given value.
        expected: Description of valid values, e.g. `an integer of at least 1`.

    Raises:
        ConfigError: `NAME is VALUE; expected EXPECTED.`
    """
    if not holds:
        raise ConfigError(f"{name} is {shown(value)}; expected {expected}.")


def check_integer(
    name: str,
    value: object,
    *,
    least: int | None = None,
    most: int | None = None,
    reason: str = "",
    optional: str = "",
) -> None:
    """Raises unless a setting is an integer (not a bool) within its bounds.

    Args:
        name: Name of the setting.
        value: Given value.
        least: Smallest valid value.
        most: Largest valid value; also give the reason.
        reason: Reason for an upper bound, e.g. `a batch is drawn at once`.
        optional: Meaning of None, e.g. `null for all`; empty if None is invalid.

    Raises:
        ConfigError: When it is invalid.
    """
    bounds = {"of at least": least, "of at most": most}
    _check_bounds(int, name, value, bounds, reason, optional)


def check_number(
    name: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    reason: str = "",
    optional: str = "",
) -> None:
    """Raises unless a setting is a finite real number (not a bool) within its bounds.

    Args:
        name: Name of the setting.
        value: Given value.
        least: Smallest valid value.
        above: Exclusive lower bound, instead of `least`.
        most: Largest valid value.
        below: Exclusive upper bound, instead of `most`.
        reason: Reason for the bound, unless obvious.
        optional: Meaning of None; empty if None is invalid.

    Raises:
        ConfigError: When it is invalid.
    """
    bounds = {"of at least": least, "above": above, "of at most": most, "below": below}
    _check_bounds(float, name, value, bounds, reason, optional)


def _check_bounds(
    kind: type,
    name: str,
    value: Any,
    bounds: Mapping[str, float | None],
    reason: str,
    optional: str,
) -> None:
    """Raises unless a setting is a number of a kind within its bounds, by the words of _COMPARISONS."""
    if value is None and optional:
        return
    given = {word: bound for word, bound in bounds.items() if bound is not None}
    holds = is_kind(value, kind) and all(
        _COMPARISONS[word](value, bound) for word, bound in given.items()
    )

    words = " and ".join(f"{word} {bound:,}" for word, bound in given.items())
    if given.keys() == {"of at least", "of at most"}:
        words = f"from {given['of at least']:,} to {given['of at most']:,}"
    expected = f"{_TYPE_NAMES[kind]} {words}".rstrip()
    if optional:
        expected += f", or {optional}"
    if reason:
        expected += f" ({reason})"
    check(holds, name, value, expected)


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raises a ConfigError unless a setting is one of a few texts."""
    known = tuple(choices)
    check(isinstance(value, str) and value in known, name, value, f"one of {', '.join(known)}")


def check_flag(name: str, value: object) -> None:
    """Raises a ConfigError unless a setting is True or False; the text "no" would be true, too."""
    check(isinstance(value, bool), name, value, "true or false")


def check_field_types(settings: object, *, prefix: str = "") -> None:
    """Checks the `Literal` and `bool` fields of a dataclass by their annotations.

    Args:
        settings: A dataclass.
        prefix: Prefix of the names in messages, e.g. `training.`.

    Raises:
        ConfigError: When a `Literal` field holds another value, or a `bool` field no bool.
    """
    assert is_dataclass(settings), f"{settings!r} is not a dataclass"
    annotations = get_type_hints(type(settings))

    for field in fields(settings):
        annotation = annotations[field.name]
        value = getattr(settings, field.name)
        if get_origin(annotation) is Literal:
            check_choice(prefix + field.name, value, get_args(annotation))
        elif annotation is bool:
            check_flag(prefix + field.name, value)


def is_kind(value: object, kind: type) -> bool:
    """Returns whether `value` is a bool, an integer or a finite number.

    Args:
        value: Anything; a bool is not a number here, but an integer is a finite number.
        kind: `bool`, `int` or `float`.
    """
    # In Python a bool is an int, but not for users.
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)

    if kind is int:
        return isinstance(value, numbers.Integral)
    return isinstance(value, numbers.Real) and math.isfinite(value)


def describe_type(annotation: Any, *, none: str = "None") -> str:
    """Returns a description of an annotation, e.g. `an integer or None`."""
    origin = get_origin(annotation)
    kinds = get_args(annotation)
    if annotation is type(None):
        return none
    if origin is Literal:
        return f"one of {', '.join(map(str, kinds))}"
    if origin is list:
        return f"a list, each {describe_type(kinds[0])}"
    if origin in (UnionType, Union):
        # An integer is a number too.
        distinct = [kind for kind in kinds if kind is not int or float not in kinds]
        return " or ".join(describe_type(kind, none=none) for kind in distinct)
    return _TYPE_NAMES.get(origin or annotation) or inspect.formatannotation(annotation)


def shown(value: object) -> str:
    """Returns the text of a value in messages: its repr, shortened if long."""
    text = repr(value).replace("\n", " ")
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}... ({len(text):,} characters)"
