"""Unicode character name -> general category: labelled data that every Python installation carries."""

import unicodedata
from collections import defaultdict
from functools import lru_cache

from eval.scores.metrics import ACCURACY
from eval.source import BuiltIn, hash_fraction, split_by_hash
from eval.task import Decoding, Features, Row, Task, register_task
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

MAX_NAMES_PER_CATEGORY = 900
BLOCK_SIZE = 16

_NUM_CODE_POINTS = 0x110000
_SPLIT_SALT = "unicode-category-v1"
NUMBERED_NAMES = ("CJK", "HANGUL SYLLABLE", "VARIATION SELECTOR", "TANGUT", "NUSHU", "KHITAN")
"""Beginnings of names that only count on, as CJK UNIFIED IDEOGRAPH-4E00."""


def _rows(split: str) -> list[Row]:
    return _all_rows()[split]


@lru_cache(maxsize=1)
def _all_rows() -> dict[str, list[Row]]:
    """Returns the rows of every split."""
    codes_by_category: dict[str, list[int]] = defaultdict(list)
    for code in range(_NUM_CODE_POINTS):
        name = unicodedata.name(chr(code), "")
        category = unicodedata.category(chr(code))
        if name and category in CATEGORIES and not name.startswith(NUMBERED_NAMES):
            codes_by_category[category].append(code)

    splits: dict[str, list[Row]] = {"train": [], "validation": [], "test": []}
    for category in sorted(codes_by_category):
        # The same random names of a large category on every machine.
        chosen = sorted(codes_by_category[category], key=_order)[:MAX_NAMES_PER_CATEGORY]
        for code in sorted(chosen):
            block = f"{code // BLOCK_SIZE * BLOCK_SIZE:06x}"
            row = {
                "code": f"U+{code:04X}",
                "block": block,
                "name": unicodedata.name(chr(code)),
                "category": category,
            }
            split = split_by_hash(f"{_SPLIT_SALT}/{block}", test=0.15, validation=0.05)
            splits[split].append(row)
    return splits


def _order(code: int) -> float:
    return hash_fraction(f"{_SPLIT_SALT}/{code:06x}")


def _preprocess(row: Row) -> list[Features]:
    """Returns the example of one character."""
    return [
        {
            "code": row["code"],
            "block": row["block"],
            "inputs": f"unicode category name: {row['name'].lower()}",
            "targets": CATEGORIES[row["category"]],
        }
    ]


_CHOICES = tuple(CATEGORIES.values())

register_task(
    Task(
        name="unicode_category",
        version=1,
        description=(
            "The name of a Unicode character, in lower case, to its general category in words "
            f"(`unicodedata` {unicodedata.unidata_version}). At most {MAX_NAMES_PER_CATEGORY} names a "
            "category; without ideographs and other numbered names. Split by blocks of "
            f"{BLOCK_SIZE} code points, a column of the Unicode charts, so that direct neighbours "
            "stay together; coarser blocks would be harder."
        ),
        licence="Unicode-3.0",
        source=BuiltIn(_rows),
        preprocess=_preprocess,
        postprocess=label_index(_CHOICES),
        metrics=(ACCURACY,),
        choices=_CHOICES,
        ids=("code",),
        groups=("block",),
        targets_length=16,
        decoding=Decoding(max_tokens=16),
        split="test",
        prompt_source="this library",
    )
)
