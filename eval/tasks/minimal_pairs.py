"""Minimal pairs of English grammar: which of two words fills a gap, without fine-tuning.

The gap is a sentinel, as in pre-training, and each choice begins with it: a pre-trained model is
asked what it was trained for. Every question has a counterpart in which the other word is right, so
a model that ignores the sentence gets exactly 50 %.

Source:
    BLiMP (arXiv:1912.00582) for the idea and most phenomena. Differs: own sentences in the words of
    documentation; a gap to fill instead of the probability of a whole sentence.
"""

import re

from eval.scores.metrics import ACCURACY
from eval.source import BuiltIn, hash_fraction
from eval.task import Decoding, Features, Row, Task, register_task
from eval.text.postprocess import choices_of, number_of_choice

_NAME = "minimal_pairs"
_GAP = "<extra_id_0>"
_DRAWS = 100
"""Pairs of sentences that are drawn for each phenomenon; those with an answered sentence drawn before are left out."""

_WORDS: dict[str, str] = {
    "one many": (
        "file files, value values, name names, method methods, string strings, module modules, "
        "function functions"
    ),
    "other others": (
        "list lists, class classes, key keys, line lines, number numbers, path paths, table tables"
    ),
    "vowel": "argument, error, object, element, integer, item, address, option",
    "adjective": "empty, valid, new, open, available, missing, invalid, small",
    "large larger": (
        "large larger, long longer, small smaller, short shorter, fast faster, old older"
    ),
    "space": "space, time, memory, information, text, work",
    "user": "user, author, developer, reader, person, caller",
    "do does done doing": (
        "return returns returned returning, create creates created creating, call calls called "
        "calling, remove removes removed removing, use uses used using, add adds added adding"
    ),
    "took taken": (
        "took taken, wrote written, gave given, chose chosen, knew known, hid hidden, saw seen"
    ),
    "child children": (
        "child children, man men, woman women, foot feet, index indices, matrix matrices, vertex "
        "vertices, criterion criteria"
    ),
    "depends on consists of": (
        "depends on consists of, belongs to differs from, results in refers to, relies on "
        "consists of, applies to starts with"
    ),
}
"""Forms of words, by their names in the sentences."""

PHENOMENA: dict[str, tuple[str, str]] = {
    "agreement": ("The {one} [is] {adjective}.", "The {many} [are] {adjective}."),
    "agreement, noun between": (
        "The {one} of the {others} [is] {adjective}.",
        "The {many} of the {other} [are] {adjective}.",
    ),
    "agreement, clause between": (
        "The {one} that contains the {others} [is] {adjective}.",
        "The {many} that contain the {other} [are] {adjective}.",
    ),
    "agreement of verbs": ("The {one} [{does}] the {other}.", "The {many} [{do}] the {other}."),
    "was or were": ("The {one} [was] {done}.", "The {many} [were] {done}."),
    "has or have": ("The {one} [has] been {done}.", "The {many} [have] been {done}."),
    "there is or are": ("There [is] a {one} in the {other}.", "There [are] {many} in the {other}."),
    "this or these": ("It {does} [this] {one}.", "It {does} [these] {many}."),
    "a or an": ("It {does} [a] {one}.", "It {does} [an] {vowel}."),
    "many or much": ("It {does} [many] {many}.", "It {does} [much] {space}."),
    "one or two": ("The {other} {does} one [{one}].", "The {other} {does} two [{many}]."),
    "irregular plural": (
        "The {other} {does} one [{child}].",
        "The {other} {does} two [{children}].",
    ),
    "modal verb": ("The {one} can [{do}] the {other}.", "The {one} always [{does}] the {other}."),
    "negation": ("The {one} does not [{do}] the {other}.", "The {one} never [{does}] the {other}."),
    "infinitive": ("It is used to [{do}] the {one}.", "The {one} is [{done}] by the {other}."),
    "progressive": ("It is now [{doing}] the {one}.", "It can now [{do}] the {one}."),
    "irregular participle": ("It has [{taken}] the {one}.", "Then it [{took}] the {one}."),
    "irregular passive": ("The {one} is [{taken}] by it.", "The {one} [{took}] it."),
    "than or as": ("It is {larger} [than] the {one}.", "It is as {large} [as] the {one}."),
    "comparative": ("It is [{larger}] than the {one}.", "It is as [{large}] as the {one}."),
    "or, nor": (
        "Either the {one} [or] the {other} is {adjective}.",
        "Neither the {one} [nor] the {other} is {adjective}.",
    ),
    "reflexive": ("The {one} {does} [itself].", "The {many} {do} [themselves]."),
    "possessive": ("The {one} and [its] {other}.", "The {many} and [their] {other}."),
    "who or which": ("The {user} [who] {does} it.", "The {one}, [which] {does} it."),
    "preposition": ("It {depends} [{on}] the {one}.", "It {consists} [{of}] the {one}."),
}
"""Two sentences for each phenomenon; the word in brackets is missing, and that of the other is wrong."""


def _forms(phenomenon: str, draw: int) -> dict[str, str]:
    """Returns the words of one draw by name, the same on every machine."""
    forms: dict[str, str] = {}
    for name, words in _WORDS.items():
        names = name.split()
        entries = words.split(", ")
        fraction = hash_fraction(f"{_NAME}/{phenomenon}/{draw}/{names[0]}")
        forms |= zip(names, entries[int(fraction * len(entries))].split(), strict=True)
    return forms


def _with_gap(sentence: str) -> tuple[str, str]:
    """Returns a sentence with `_` in place of the word in brackets, and the word."""
    before, word, after = re.split(r"[\[\]]", sentence)
    return f"{before}_{after}", word


def _rows(split: str) -> list[Row]:
    """Returns all rows: there is nothing to fine-tune on."""
    rows: list[Row] = []
    for phenomenon, templates in PHENOMENA.items():
        drawn: set[tuple[str, str]] = set()
        for draw in range(_DRAWS):
            forms = _forms(phenomenon, draw)
            first, second = (_with_gap(template.format(**forms)) for template in templates)
            if {first, second} & drawn:
                continue

            drawn |= {first, second}
            for (sentence, right), (_, wrong) in ((first, second), (second, first)):
                rows.append(
                    {
                        "id": f"{phenomenon} {draw}: {right}",
                        "phenomenon": phenomenon,
                        "sentence": sentence,
                        "right": right,
                        "wrong": wrong,
                    }
                )
    return rows


def _preprocess(row: Row) -> list[Features]:
    """Returns the example of one sentence."""
    choices = sorted((row["right"], row["wrong"]))
    return [
        {
            "id": row["id"],
            "phenomenon": row["phenomenon"],
            "inputs": row["sentence"].replace("_", _GAP),
            "targets": f"{_GAP} {row['right']}",
            "choices": [f"{_GAP} {choice}" for choice in choices],
        }
    ]


register_task(
    Task(
        name=_NAME,
        version=1,
        description=(
            f"Which of two words fills the gap of a sentence: {len(PHENOMENA)} phenomena of English grammar. "
            "Made to be ranked by a pre-trained model, with --modes rank --no-eos; chance is 50 %."
        ),
        licence="Apache-2.0",
        source=BuiltIn(_rows, splits=("test",), origin="this library"),
        preprocess=_preprocess,
        postprocess=number_of_choice,
        metrics=(ACCURACY,),
        choices=choices_of,
        ids=("id",),
        groups=("phenomenon",),
        inputs_length=64,
        targets_length=8,
        decoding=Decoding(max_tokens=8),
        split="test",
        prompt_source="this library",
    )
)
