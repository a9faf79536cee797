"""A WordNet written by hand, and tests that need the system's own."""

import pytest

from eval.corpora.wordnet import LEXICOGRAPHER_FILES, find_wordnet
from moe.errors import DataError


def wordnet_line(offset: int, lexicographer: str, kind: str, word: str, gloss: str) -> str:
    """Returns a synset of one word as a line of a data file."""
    number = LEXICOGRAPHER_FILES.index(lexicographer)
    return f"{offset:08} {number:02} {kind} 01 {word} 0 000 | {gloss}  \n"


def _has_wordnet() -> bool:
    try:
        find_wordnet()
    except DataError:
        return False
    return True


needs_wordnet = pytest.mark.skipif(not _has_wordnet(), reason="WordNet is not installed")
