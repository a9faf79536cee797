"""JSON objects that end with a checksum, which reveals edits and damaged bytes."""

import hashlib
from typing import Any

SEAL = "sha256"
"""Name of the field with the checksum."""

_SEAL_START = f', "{SEAL}": "'


def seal(text: str, before: str = "") -> str:
    """Returns the text of a JSON object whose last field is a checksum of everything before it.

    Args:
        text: The object, which must have fields.
        before: Additional data, e.g. the seal of the previous object.
    """
    body = text.rstrip().removesuffix("}").rstrip()
    return f'{body}{_SEAL_START}{_digest(before, body)}"}}'


def is_whole(text: str, value: dict[str, Any], before: str = "") -> bool:
    """Returns whether a sealed text is unchanged.

    Args:
        text: The sealed object.
        value: Content of the file.
        before: The same as for `seal`.
    """
    body, _, end = text.rstrip().rpartition(_SEAL_START)
    digest = _digest(before, body)
    return value.get(SEAL) == digest and end == f'{digest}"}}'


def _digest(before: str, body: str) -> str:
    return hashlib.sha256(f"{before}\n{body}".encode()).hexdigest()
