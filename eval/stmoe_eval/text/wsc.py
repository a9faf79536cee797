"""From a row of Winograd schemas to `inputs` and `targets`: which noun a marked pronoun refers to.

Source: T5 `t5/data/preprocessors.py` (google-research/text-to-text-transfer-transformer at
e081111).
"""

import re

from moe.errors import DataError
from stmoe_eval.task import Features, Row

_MISPLACED = {
    "The boy continued to whip the pony , and eventually the pony threw him over. John laughed out quite loud. "
    '"Good for him," he said.': "The boy continued to whip the pony , and eventually the pony threw him over. John "
    'laughed out quite loud. "Good for X ," he said.',
    "When they had eventually calmed down a bit , and had gotten home, Mr. Farley put the magic pebble in an iron safe "
    ". Some day they might want to use it , but really for now, what more could they wish for?": "When they had "
    "eventually calmed down a bit , and had gotten home, Mr. Farley put the magic pebble in an iron safe . Some day "
    "they might want to use X , but really for now, what more could they wish for?",
}
"""Rows of SuperGLUE whose index does not point at the pronoun, and what T5 makes of them; X is the pronoun."""


def wsc_simple(row: Row, *, correct_referent_only: bool = False) -> list[Features]:
    """Maps a text, its pronoun in asterisks, to the candidate referent, right or wrong.

    Args:
        row: A row of wsc.fixed.
        correct_referent_only: For training: rows whose candidate is wrong are skipped.

    Raises:
        DataError: When the index of the pronoun does not point at it.

    Source:
        T5 `wsc_simple`. Differs: no.
    """
    label = row.get("label", 0)
    if correct_referent_only and not label:
        return []

    text = _with_blank(row).replace(" X ", f" *{row['span2_text']}* ")
    return [
        {"inputs": f"wsc: {text}", "targets": row["span1_text"], "label": label, "idx": row["idx"]}
    ]


def definite_pronoun_resolution_simple(row: Row) -> list[Features]:
    """Maps a sentence, its pronoun in asterisks, to the right candidate.

    The first occurrence of the pronoun is marked.

    Source:
        T5 `definite_pronoun_resolution_simple`. Differs: the pronoun is matched literally, where T5
        treats it as a regular expression.
    """
    pattern = f" ({re.escape(row['pronoun'])})( |\\.|,)"
    sentence = re.sub(pattern, r" *\1*\2", row["sentence"], count=1)
    return [{"inputs": f"wsc: {sentence}", "targets": row["candidates"][row["label"]]}]


def _with_blank(row: Row) -> str:
    """Returns the text with X in place of its pronoun."""
    misplaced = _MISPLACED.get(row["text"].rstrip(" "))
    if misplaced is not None:
        return misplaced

    words = row["text"].split(" ")
    index = row["span2_index"]
    if not 0 < index < len(words) or words[index] != row["span2_text"]:
        raise DataError(
            f"span2_index {index} of WSC row {row['idx']} does not point at the pronoun "
            f"{row['span2_text']!r} in {row['text']!r}. Expected the number of a word that is not "
            "the first; use the data of wsc.fixed."
        )

    # With nothing after it, it still has the space that T5 gives it.
    before = " ".join(words[:index])
    after = " ".join(words[index + 1 :])
    return f"{before} X {after}"
