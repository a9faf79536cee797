"""Unicode character name -> general category: real labelled data that every Python installation
carries.
"""

import hashlib
import unicodedata
from collections import defaultdict
from functools import lru_cache
from typing import Any

from eval.scores.metrics import ACCURACY
from eval.source import BuiltIn
from eval.task import TASKS, Decoding, Row, Task
from eval.text.postprocess import label_index

CATEGORIES = {
    "Cf": "format control",
    "Ll": "lowercase letter",
    "Lm": "modifier letter",
    "Lo": "other letter",
    "Lu": "uppercase letter",
    "Mc": "spacing mark",
    "Mn": "nonspacing mark",
    "Nd": "decimal number",
    "Nl": "letter number",
    "No": "other number",
    "Pe": "close punctuation",
    "Po": "other punctuation",
    "Ps": "open punctuation",
    "Sc": "currency symbol",
    "Sk": "modifier symbol",
    "Sm": "math symbol",
    "So": "other symbol",
}
"""The categories with at least 60 names, in words."""

MOST_OF_A_CATEGORY = 900
BLOCK_SIZE = 16
_SPLIT_SALT = "unicode-category-v1"
_SHARES = (("test", 0.15), ("validation", 0.20))
_NUMBERED = ("CJK", "HANGUL SYLLABLE", "VARIATION SELECTOR", "TANGUT", "NUSHU", "KHITAN")


@lru_cache(maxsize=1)
def _all_rows() -> dict[str, list[Row]]:
    """Returns the rows of every split."""
    by_category: dict[str, list[int]] = defaultdict(list)
    for code in range(0x110000):
        name, category = unicodedata.name(chr(code), ""), unicodedata.category(chr(code))
        if name and category in CATEGORIES and not name.startswith(_NUMBERED):
            by_category[category].append(code)
    splits: dict[str, list[Row]] = {"train": [], "validation": [], "test": []}
    for category in sorted(by_category):
        chosen = sorted(by_category[category], key=lambda code: _place(f"{code:06x}"))[
            :MOST_OF_A_CATEGORY
        ]
        for code in sorted(chosen):
            block = f"{code // BLOCK_SIZE * BLOCK_SIZE:06x}"
            row = {
                "code": f"U+{code:04X}",
                "block": block,
                "name": unicodedata.name(chr(code)),
                "category": category,
            }
            splits[_split_of(block)].append(row)
    return splits


def _preprocess(row: Row) -> list[dict[str, Any]]:
    """Returns the example of one character."""
    inputs = f"unicode category name: {row['name'].lower()}"
    return [
        {
            "code": row["code"],
            "block": row["block"],
            "inputs": inputs,
            "targets": CATEGORIES[row["category"]],
        }
    ]


def _split_of(block: str) -> str:
    """Returns the split of a block; it depends on the block alone."""
    place = _place(block)
    return next((split for split, share in _SHARES if place < share), "train")


def _place(text: str) -> float:
    """Returns a number in [0, 1) that depends on `text` alone, on every machine."""
    return (
        int.from_bytes(hashlib.sha256(f"{_SPLIT_SALT}/{text}".encode()).digest()[:6], "big") / 2**48
    )


TASKS.add(
    "unicode_category",
    Task(
        name="unicode_category",
        version=1,
        description=(
            "The name of a Unicode character, in lower case, to its general category in words "
            f"(`unicodedata` {unicodedata.unidata_version}). At most {MOST_OF_A_CATEGORY} names a category; without "
            f"ideographs and other numbered names. Split by blocks of {BLOCK_SIZE} code points, a column of the "
            "Unicode charts, so that direct neighbours stay together; coarser blocks would be harder."
        ),
        licence="Unicode-3.0",
        source=BuiltIn(lambda split: _all_rows()[split]),
        preprocess=_preprocess,
        postprocess=label_index(tuple(CATEGORIES.values())),
        metrics=(ACCURACY,),
        choices=tuple(CATEGORIES.values()),
        ids=("code",),
        groups=("block",),
        targets_length=16,
        decoding=Decoding(max_tokens=16),
        split="test",
        prompt_source="this library",
    ),
)
