"""WordNet definition -> its supersense, a task that pre-training can help.

A supersense is the file in which a lexicographer wrote the noun or verb: animal, feeling, motion.
"""

from collections import Counter, defaultdict
from functools import lru_cache

from eval.corpora.wordnet import (
    LEXICOGRAPHER_FILES,
    WORDNET_LICENCE,
    Synset,
    find_wordnet,
    read_synsets,
)
from eval.scores.metrics import ACCURACY
from eval.source import SystemData, hash_fraction, split_by_hash
from eval.task import SPLITS, Decoding, Features, Row, Task, register_task
from eval.text.postprocess import label_index
from moe.data.prose import letters

MAX_SYNSETS_PER_CLASS = 700
MIN_WORDS = 3

_SPLIT_SALT = "wordnet-supersense-v1"
_TOO_SMALL = {"noun.Tops", "noun.motive", "verb.weather"}


def _supersenses() -> dict[str, str]:
    """Returns the classes with more than 200 synsets, as readable names, by lexicographer file."""
    words: dict[str, str] = {}
    for file in LEXICOGRAPHER_FILES:
        part_of_speech, _, name = file.partition(".")
        if file not in _TOO_SMALL and part_of_speech in ("noun", "verb"):
            # Some nouns and verbs share a name, e.g. communication.
            words[file] = name if part_of_speech == "noun" else f"{name} (verb)"
    return words


SUPERSENSES = _supersenses()
"""The classes in words, e.g. "animal" and "motion (verb)", by lexicographer file."""


def _rows(split: str) -> list[Row]:
    return _all_rows()[split]


@lru_cache(maxsize=1)
def _all_rows() -> dict[str, list[Row]]:
    """Returns the rows of every split; definitions shared by several synsets are excluded."""
    # A shared definition would be in two splits, or in one and in the text of another.
    synsets = read_synsets(find_wordnet())
    num_synsets = Counter(letters(synset.definition) for synset in synsets)

    synsets_by_file: dict[str, list[Synset]] = defaultdict(list)
    for synset in synsets:
        is_long_enough = len(synset.definition.split()) >= MIN_WORDS
        if is_long_enough and num_synsets[letters(synset.definition)] == 1:
            synsets_by_file[synset.lexicographer].append(synset)

    splits: dict[str, list[Row]] = {split: [] for split in SPLITS}
    for file in SUPERSENSES:
        # The same random synsets of a large class on every machine.
        chosen = sorted(synsets_by_file[file], key=_order)[:MAX_SYNSETS_PER_CLASS]
        for synset in sorted(chosen, key=lambda synset: synset.id):
            # The split depends on the definition, so it is stable across versions of WordNet.
            row = {"id": synset.id, "definition": synset.definition, "lexicographer": file}
            key = f"{_SPLIT_SALT}/{letters(synset.definition)}"
            splits[split_by_hash(key, test=0.09, validation=0.022)].append(row)
    return splits


def _order(synset: Synset) -> float:
    return hash_fraction(f"{_SPLIT_SALT}/order/{letters(synset.definition)}")


def _preprocess(row: Row) -> list[Features]:
    """Returns the example of one definition."""
    return [
        {
            "id": row["id"],
            "document": f"wordnet/{row['id']}",
            "inputs": f"supersense of: {row['definition']}",
            "targets": SUPERSENSES[row["lexicographer"]],
        }
    ]


_CHOICES = tuple(SUPERSENSES.values())

register_task(
    Task(
        name="wordnet_supersense",
        version=1,
        description=(
            "The definition of a noun or verb in WordNet to its supersense, the lexicographers' "
            f"class, one of {len(SUPERSENSES)} in words. At most {MAX_SYNSETS_PER_CLASS} synsets a "
            "class; definitions that several synsets share are left out. Needs WordNet on this "
            "system, e.g. Debian's wordnet-base, or rows of your own."
        ),
        licence=WORDNET_LICENCE,
        source=SystemData(
            _rows,
            task="wordnet_supersense",
            origin="WordNet on this system",
            columns={"id": str, "definition": str, "lexicographer": str},
            labels={"lexicographer": tuple(SUPERSENSES)},
        ),
        preprocess=_preprocess,
        postprocess=label_index(_CHOICES),
        metrics=(ACCURACY,),
        choices=_CHOICES,
        ids=("id",),
        groups=("document",),
        inputs_length=128,
        targets_length=16,
        decoding=Decoding(max_tokens=16),
        split="test",
        prompt_source="this library",
    )
)
