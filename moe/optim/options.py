"""Options that a recipe gives to an optimizer or a schedule by name: the keywords of a function.

Read with optimizers.py and schedules.py, whose entries declare their options as keywords.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from moe.checks import check, is_kind, shown
from moe.errors import ConfigError, did_you_mean

_KINDS = {bool: "true or false", int: "an integer", float: "a finite number"}


def option_names(function: Callable[..., Any], reserved: Collection[str]) -> list[str]:
    """Returns the keywords of a function that a recipe may give as options.

    Args:
        function: An entry of a registry.
        reserved: Keywords with their own keys in recipes.
    """
    return [name for name in _keywords(function) if name not in reserved]


def check_options(
    place: str,
    owner: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    reserved: Collection[str],
) -> None:
    """Raises unless a function has all options, and each has a value of its type.

    Args:
        place: Key of the recipe, for messages, e.g. `optim.schedule_options`.
        owner: Name of the entry.
        function: Function whose keywords are the options.
        options: Values by name.
        reserved: Keywords that recipes have their own keys for.

    Raises:
        ConfigError: For the first option that is unknown, or of another type.
    """
    known = option_names(function, reserved)
    for name in options:
        if name not in known:
            raise ConfigError(
                f"{place}: {owner} has no option {shown(name)}.{did_you_mean(name, known)} "
                f"Known: {', '.join(known) or 'none'}."
            )

    annotations = typing.get_type_hints(
        function.__init__ if isinstance(function, type) else function
    )
    for name, value in options.items():
        _check_kind(f"{place}.{name}", value, annotations.get(name))


@functools.cache
def _keywords(function: Callable[..., Any]) -> list[str]:
    """Returns the keyword-only parameters of a function, or of a class's constructor."""
    parameters = inspect.signature(function).parameters.values()
    return [item.name for item in parameters if item.kind is item.KEYWORD_ONLY]


def _check_kind(name: str, value: object, annotation: Any) -> None:
    """Raises a ConfigError when a value does not have the type of the annotation."""
    kinds = typing.get_args(annotation) or (annotation,)

    # One of a few texts.
    if typing.get_origin(annotation) is typing.Literal:
        is_choice = isinstance(value, str) and value in kinds
        check(is_choice, name, value, f"one of {', '.join(map(str, kinds))}")

    # A number or a flag, or null where the annotation allows it.
    is_null = value is None and type(None) in kinds
    for kind in kinds:
        if kind in _KINDS and not is_null:
            check(is_kind(value, kind), name, value, _KINDS[kind])
