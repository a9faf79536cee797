"""Cases that hypothesis draws: any value at any place of a file, and any bytes anywhere in it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.doors.damage import edit
from tests.doors.driver import Place

Spoil = Callable[[Place], None]

_ODD_TEXTS = ("", "no", "null", "../../x", "\ud800", "1", "-1", "nan", "9" * 400, "x" * 300)

# Sizes between 64 and 10**9 are left out: 1,000 layers or a d_ff of a million are legal, and only take
# long. Hypothesis would draw some of them, since it tries the constants of our source.
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(max_value=64),
    st.integers(min_value=10**9),
    st.integers(min_value=10**12, max_value=10**400),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(_ODD_TEXTS),
)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.text(max_size=5), SCALARS, max_size=3),
)


def drawn_edits(path: Path, file: str, number: int) -> list[tuple[str, Spoil]]:
    """Returns that many changes of one value in a file of JSON, JSON lines or YAML, each with its
    description.

    Args:
        path: The valid file.
        file: Its name in the workspace.
        number: How many.
    """
    places = sorted({".".join(place) for place in _places(_read(path))})
    drawn: list[tuple[str, Spoil]] = []

    @_quickly(number)
    @given(st.sampled_from(places), VALUES)
    def draw(key: str, value: Any) -> None:
        drawn.append((f"{file} {key}={shortened(value)}", _editor(file, key, value)))

    draw()
    return drawn


def drawn_bytes(path: Path, file: str, number: int) -> list[tuple[str, Spoil]]:
    """Returns that many changes of some bytes in a file, each with its description; the arguments
    as above.
    """
    size = path.stat().st_size
    drawn: list[tuple[str, Spoil]] = []

    @_quickly(number)
    @given(st.integers(0, size - 1), st.integers(0, 9), st.binary(max_size=9))
    def draw(start: int, length: int, content: bytes) -> None:
        drawn.append(
            (
                f"{file} bytes {start}:{start + length}={content!r}",
                _writer(file, start, length, content),
            )
        )

    draw()
    return drawn


def drawn_values(number: int) -> list[Any]:
    """Returns that many values of any type."""
    drawn: list[Any] = []

    @_quickly(number)
    @given(VALUES)
    def draw(value: Any) -> None:
        drawn.append(value)

    draw()
    return drawn


def shortened(value: Any) -> str:
    """Returns a value in few letters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _quickly(number: int) -> Callable[[Any], Any]:
    """Returns the settings under which hypothesis only draws: always the same, and never a second
    time.
    """
    return settings(
        max_examples=number,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def _editor(file: str, key: str, value: Any) -> Spoil:
    """Returns what changes one value of a case's copy."""
    return lambda place: edit(place.own / file, key, value)


def _writer(file: str, start: int, length: int, content: bytes) -> Spoil:
    """Returns what changes bytes of a case's copy."""

    def write(place: Place) -> None:
        path = place.own / file
        whole = path.read_bytes()
        path.write_bytes(whole[:start] + content + whole[start + length :])

    return write


def _read(path: Path) -> Any:
    """Returns the content of a file of JSON, JSON lines or YAML."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        return yaml.safe_load(text)
    return (
        [json.loads(line) for line in text.splitlines()]
        if path.suffix == ".jsonl"
        else json.loads(text)
    )


def _places(value: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the path of every value inside a value; of long lists those of the first few."""
    if prefix:
        yield prefix
    items = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    for key, item in items[:40]:
        if "." not in str(key):
            yield from _places(item, (*prefix, str(key)))
