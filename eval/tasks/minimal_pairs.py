"""Minimal pairs of English grammar: which of two words fills a gap, without fine-tuning.

The gap is a sentinel, as in pre-training, and each choice begins with it: a pre-trained model is
asked what it was trained for. Every question has a counterpart in which the other word is right, so
a model that ignores the sentence gets exactly 50 %.

Source:
    BLiMP (arXiv:1912.00582) for the idea and most phenomena. Differs: own sentences in the words of
    documentation; a gap to fill instead of the probability of a whole sentence.
"""

from eval.scores.metrics import ACCURACY
from eval.source import BuiltIn, hash_fraction
from eval.task import Decoding, Features, Row, Task, register_task

_NAME = "minimal_pairs"
_GAP = "<extra_id_0>"
_DRAWS = 100
"""Pairs of sentences that are drawn for each phenomenon; those with an answered sentence drawn before are left out."""

_NOUNS = "file files, value values, name names, method methods, string strings, module modules, function functions"
_OTHER_NOUNS = (
    "list lists, class classes, key keys, line lines, number numbers, path paths, table tables"
)
_WORDS: dict[tuple[str, ...], str] = {
    ("one", "many"): _NOUNS,
    ("other", "others"): _OTHER_NOUNS,
    ("vowel",): "argument, error, object, element, integer, item, address, option",
    ("adjective",): "empty, valid, new, open, available, missing, invalid, small",
    (
        "large",
        "larger",
    ): "large larger, long longer, small smaller, short shorter, fast faster, old older",
    ("space",): "space, time, memory, information, text, work",
    ("user",): "user, author, developer, reader, person, caller",
    ("do", "does", "done", "doing"): (
        "return returns returned returning, create creates created creating, call calls called calling, "
        "remove removes removed removing, use uses used using, add adds added adding"
    ),
    (
        "took",
        "taken",
    ): "took taken, wrote written, gave given, chose chosen, knew known, hid hidden, saw seen",
    ("child", "children"): (
        "child children, man men, woman women, foot feet, index indices, matrix matrices, vertex vertices, "
        "criterion criteria"
    ),
    ("depends", "on", "consists", "of"): (
        "depends on consists of, belongs to differs from, results in refers to, relies on consists of, "
        "applies to starts with"
    ),
}
"""Forms of words by their names in the sentences."""

PHENOMENA: dict[str, tuple[str, str, str, str]] = {
    "agreement": ("The {one} _ {adjective}.", "is", "The {many} _ {adjective}.", "are"),
    "agreement, noun between": (
        "The {one} of the {others} _ {adjective}.",
        "is",
        "The {many} of the {other} _ {adjective}.",
        "are",
    ),
    "agreement, clause between": (
        "The {one} that contains the {others} _ {adjective}.",
        "is",
        "The {many} that contain the {other} _ {adjective}.",
        "are",
    ),
    "agreement of verbs": (
        "The {one} _ the {other}.",
        "{does}",
        "The {many} _ the {other}.",
        "{do}",
    ),
    "was or were": ("The {one} _ {done}.", "was", "The {many} _ {done}.", "were"),
    "has or have": ("The {one} _ been {done}.", "has", "The {many} _ been {done}.", "have"),
    "there is or are": (
        "There _ a {one} in the {other}.",
        "is",
        "There _ {many} in the {other}.",
        "are",
    ),
    "this or these": ("It {does} _ {one}.", "this", "It {does} _ {many}.", "these"),
    "a or an": ("It {does} _ {one}.", "a", "It {does} _ {vowel}.", "an"),
    "many or much": ("It {does} _ {many}.", "many", "It {does} _ {space}.", "much"),
    "one or two": ("The {other} {does} one _.", "{one}", "The {other} {does} two _.", "{many}"),
    "irregular plural": (
        "The {other} {does} one _.",
        "{child}",
        "The {other} {does} two _.",
        "{children}",
    ),
    "modal verb": (
        "The {one} can _ the {other}.",
        "{do}",
        "The {one} always _ the {other}.",
        "{does}",
    ),
    "negation": (
        "The {one} does not _ the {other}.",
        "{do}",
        "The {one} never _ the {other}.",
        "{does}",
    ),
    "infinitive": (
        "It is used to _ the {one}.",
        "{do}",
        "The {one} is _ by the {other}.",
        "{done}",
    ),
    "progressive": ("It is now _ the {one}.", "{doing}", "It can now _ the {one}.", "{do}"),
    "irregular participle": ("It has _ the {one}.", "{taken}", "Then it _ the {one}.", "{took}"),
    "irregular passive": ("The {one} is _ by it.", "{taken}", "The {one} _ it.", "{took}"),
    "than or as": ("It is {larger} _ the {one}.", "than", "It is as {large} _ the {one}.", "as"),
    "comparative": ("It is _ than the {one}.", "{larger}", "It is as _ as the {one}.", "{large}"),
    "or, nor": (
        "Either the {one} _ the {other} is {adjective}.",
        "or",
        "Neither the {one} _ the {other} is {adjective}.",
        "nor",
    ),
    "reflexive": ("The {one} {does} _.", "itself", "The {many} {do} _.", "themselves"),
    "possessive": ("The {one} and _ {other}.", "its", "The {many} and _ {other}.", "their"),
    "who or which": ("The {user} _ {does} it.", "who", "The {one}, _ {does} it.", "which"),
    "preposition": ("It {depends} _ the {one}.", "{on}", "It {consists} _ the {one}.", "{of}"),
}
"""Two sentences and the word for the gap `_` of each, by phenomenon."""


def _forms(phenomenon: str, draw: int) -> dict[str, str]:
    """Returns the words of one draw by name, the same on every machine."""
    forms: dict[str, str] = {}
    for names, words in _WORDS.items():
        entries = words.split(", ")
        fraction = hash_fraction(f"{_NAME}/{phenomenon}/{draw}/{names[0]}")
        forms |= zip(names, entries[int(fraction * len(entries))].split(), strict=True)
    return forms


def _rows(split: str) -> list[Row]:
    """Returns all rows: there is nothing to fine-tune on."""
    rows: list[Row] = []
    for phenomenon, templates in PHENOMENA.items():
        drawn: set[tuple[str, str]] = set()
        for draw in range(_DRAWS):
            forms = _forms(phenomenon, draw)
            first, word, second, other_word = (text.format(**forms) for text in templates)
            gaps = {(first, word), (second, other_word)}
            if gaps & drawn:
                continue

            drawn |= gaps
            for sentence, right, wrong in ((first, word, other_word), (second, other_word, word)):
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


def _choices(fields: Features) -> tuple[str, ...]:
    return tuple(fields["choices"])


def _number_of_choice(text: str, fields: Features, is_target: bool) -> int:
    """Returns the number of the choice that equals the text; -1 for none."""
    choices = fields["choices"]
    return choices.index(text) if text in choices else -1


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
        postprocess=_number_of_choice,
        metrics=(ACCURACY,),
        choices=_choices,
        ids=("id",),
        groups=("phenomenon",),
        inputs_length=64,
        targets_length=8,
        decoding=Decoding(max_tokens=8),
        split="test",
        prompt_source="this library",
    )
)
