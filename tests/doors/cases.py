"""From the files of cases to cases: every line of tests/doors/cases/*.yaml is some knocks on one
door.

A door is a command with `argv`, or a function of knocks.py with `arguments`. Around what is valid
there stand

- `refused`, `accepted` and `either`: by option or argument the values that take its place; under
  `calls` whole command lines, each perhaps with words of which the message must hold one;
- `damage`, `harmless` and `unsure`: by file what is wrong with it (names of damage.py), which must
  be refused, be accepted, or either; `edits`, `harmless_edits` and `unsure_edits`: by file and key
  the values that are put there;
- `drawn`, `drawn_bytes` and `drawn_arguments`: how many cases hypothesis draws;
- `changes`: what the door may change of its copies when it accepts; `rewrites`: what it makes anew
  whatever happens;
- `any_words`: whether a refusal may hold the name of an error of Python;
- `says`: by option, argument or key further words of which a refusal may hold one.
"""

import importlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from tests.doors import knocks
from tests.doors.damage import VALUES, value_of
from tests.doors.drawn import drawn_bytes, drawn_edits, drawn_values, shortened
from tests.doors.driver import Case, Place, command, spoiler

FOLDER = Path(__file__).parent / "cases"
_EXPECTED = ("refused", "accepted", "either")
_DAMAGE = {"damage": "refused", "harmless": "accepted", "unsure": "either"}
_EDITS = {"edits": "refused", "harmless_edits": "accepted", "unsure_edits": "either"}
_DRAWN = {"drawn": drawn_edits, "drawn_bytes": drawn_bytes}
_KEYS = {
    *(
        "door",
        "argv",
        "arguments",
        "module",
        "calls",
        "changes",
        "rewrites",
        "says",
        "any_words",
        "drawn_arguments",
    ),
    *(*_EXPECTED, *_DAMAGE, *_EDITS, *_DRAWN),
}

Door = dict[str, Any]


@cache
def read_doors() -> list[Door]:
    """Returns what the files of cases say of each door."""
    doors = []
    for file in sorted(FOLDER.glob("*.yaml")):
        doors += yaml.safe_load(file.read_text(encoding="utf-8")) or []
    for door in doors:
        unknown = door.keys() - _KEYS
        assert "door" in door and not unknown, f"{door.get('door')}: there is no {sorted(unknown)}"
    return doors


def door_names() -> list[str]:
    """Returns the names of all doors, each once."""
    return list(dict.fromkeys(door["door"] for door in read_doors()))


def cases_of(name: str, workspace: Path) -> list[Case]:
    """Returns the cases of a door, those that are listed and those that are drawn."""
    return [
        case for door in read_doors() if door["door"] == name for case in _cases(door, workspace)
    ]


def _cases(door: Door, workspace: Path) -> Iterator[Case]:
    """Yields the cases of one entry."""
    yield from _value_cases(door)
    yield from _call_cases(door)
    yield from _file_cases(door)
    yield from _drawn_cases(door, workspace)


def _value_cases(door: Door) -> Iterator[Case]:
    """Yields a case for each value of an option or argument."""
    for expect in _EXPECTED:
        for option, values in (door.get(expect) or {}).items():
            says = (door.get("says") or {}).get(option, [])
            for value in values:
                label = f"{option}={str(value)[:50]}"
                names = (option.lstrip("-"), *_shown(value), *says)
                yield _case(door, label, {option: value}, expect=expect, names=names)


def _call_cases(door: Door) -> Iterator[Case]:
    """Yields a case for each whole command line."""
    for expect, lines in (door.get("calls") or {}).items():
        for line in lines:
            given, *says = line if isinstance(line, list) else [line]
            yield _case(door, given, {}, expect=expect, names=tuple(says), argv=given)


def _file_cases(door: Door) -> Iterator[Case]:
    """Yields a case for each damage to a file, and each edit."""
    for section, expect in _DAMAGE.items():
        for file, kinds in (door.get(section) or {}).items():
            for kind in kinds:
                spoil = spoiler(file, (kind,))
                yield _case(
                    door,
                    f"{file} {kind}",
                    {},
                    expect=expect,
                    names=_parts(file),
                    spoil=spoil,
                    file=file,
                )
    for section, expect in _EDITS.items():
        for file, keys in (door.get(section) or {}).items():
            for key, values in keys.items():
                says = (door.get("says") or {}).get(key, [])
                for value in values:
                    label = f"{file} {key}={str(value)[:50]}"
                    spoil = spoiler(file, (), key, value)
                    names = (*_parts(file), key.split(".")[-1], *says)
                    yield _case(door, label, {}, expect=expect, names=names, spoil=spoil, file=file)


def _drawn_cases(door: Door, workspace: Path) -> Iterator[Case]:
    """Yields the cases of an entry that hypothesis draws; what is refused must be so in clear
    words.
    """
    for section, draw in _DRAWN.items():
        for file, number in (door.get(section) or {}).items():
            for label, spoil in draw(workspace / file, file, number):
                yield _case(door, label, {}, expect="either", spoil=spoil, file=file)
    for name, number in (door.get("drawn_arguments") or {}).items():
        for value in drawn_values(number):
            yield _case(door, f"{name}={shortened(value)}", {name: value}, expect="either")


def _case(
    door: Door,
    label: str,
    changes: dict[str, Any],
    *,
    argv: str | None = None,
    file: str = "",
    **facts: Any,
) -> Case:
    """Returns a case of a door with changed options, and with copies of what it damages or may
    change.
    """
    knock = partial(_run, door, changes, argv) if "argv" in door else partial(_call, door, changes)
    may_change, rewrites = tuple(door.get("changes") or ()), tuple(door.get("rewrites") or ())
    copied = tuple(dict.fromkeys(name.split("/")[0] for name in (file, *may_change) if name))
    return Case(
        door=door["door"],
        name=label,
        knock=knock,
        copied=copied,
        may_change=may_change,
        rewrites=rewrites,
        any_words=bool(door.get("any_words")),
        **facts,
    )


def _run(door: Door, changes: dict[str, Any], argv: str | None, place: Place) -> None:
    """Runs a command."""
    words = shlex.split(door["argv"] if argv is None else argv)
    for option, value in changes.items():
        words = with_option(words, option, value)
    name, *verb = (door.get("module") or door["door"]).split()
    command(importlib.import_module(name), [*verb, *(place.fill(word) for word in words)])


def _call(door: Door, changes: dict[str, Any], place: Place) -> Any:
    """Calls a function of knocks.py."""
    arguments = {**(door.get("arguments") or {}), **changes}
    filled = {
        name: _filled(value, place) for name, value in arguments.items() if value != "$absent"
    }
    name = door["door"].split(" ")[0].replace(".", "_")
    knock: Callable[..., Any] = getattr(knocks, f"{name}_", None) or getattr(knocks, name)
    return knock(**filled)


def _filled(value: Any, place: Place) -> Any:
    """Returns a value for a function: names of VALUES and of the workspace's things are put in."""
    if isinstance(value, str):
        return value_of(value) if value in VALUES else knocks.value_of(place.fill(value))
    if isinstance(value, list):
        return [_filled(item, place) for item in value]
    if isinstance(value, dict):
        return {name: _filled(item, place) for name, item in value.items()}
    return value


def with_option(words: Sequence[str], option: str, value: Any) -> list[str]:
    """Returns a command line in which an option has another value; None takes it away, a list gives
    several.
    """
    words = list(words)
    if option in words:
        start = words.index(option)
        end = next(
            (i for i in range(start + 1, len(words)) if words[i].startswith("--")), len(words)
        )
        words = words[:start] + words[end:]
    if value is None:
        return words
    values = value if isinstance(value, list) else [value]
    return [
        *words,
        option,
        *(str(value_of(item)) if item != "$digits" else "9" * 5000 for item in values),
    ]


def _shown(value: Any) -> tuple[str, ...]:
    """Returns how a message may show a value."""
    if isinstance(value, list):
        return tuple(text for item in value for text in _shown(item))
    text = str(value)
    if not text or text.startswith("$"):
        return ()
    name = text[:40].split("{")[-1].rstrip("}")
    return (name, repr(name)[1:-1])  # control characters are shown as escapes


def _parts(file: str) -> tuple[str, ...]:
    """Returns what names a file: its own name, or a path to it or to a folder that it is in."""
    steps = file.split("/")
    return (steps[-1], *("/" + "/".join(steps[:number]) for number in range(1, len(steps) + 1)))
