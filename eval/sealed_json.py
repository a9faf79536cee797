"""The checksum that a JSON object of an evaluation ends with, by which an edit or a damaged byte is
noticed.
"""

import hashlib
from typing import Any

SEAL = "sha256"
"""Name of the field."""

_START = f', "{SEAL}": "'


def seal(text: str, before: str = "") -> str:
    """Returns the text of a JSON object with one more field at its end: the SHA-256 of all that
    stands before it.

    Args:
        text: The object, which has fields.
        before: What else counts, e.g. the seal of the object before this one.
    """
    body = text.rstrip().removesuffix("}").rstrip()
    return f'{body}{_START}{_digest(before, body)}"}}'


def is_whole(text: str, value: dict[str, Any], before: str = "") -> bool:
    """Returns whether a sealed text is the one that was written.

    Args:
        text: The object.
        value: What it holds.
        before: As it was given to `seal`.
    """
    body, _, rest = text.rstrip().rpartition(_START)
    digest = _digest(before, body)
    return value.get(SEAL) == digest and rest == f'{digest}"}}'


def _digest(before: str, body: str) -> str:
    """Returns the SHA-256 of two texts in hexadecimal digits."""
    return hashlib.sha256(f"{before}\n{body}".encode()).hexdigest()
