"""WordNet definition -> the word, without a text to look it up in: it tests knowledge from
pre-training.

A model is fine-tuned on some words and tested on others, so it can know an answer only from
pre-training, whose text has the definitions with their words. The four words of a question occur in
three more questions, each word once as the answer: any fixed order of words is right in one of
four. Some words are likely for any question; `matching` (eval/scores/matching.py) leaves that out.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache

from eval.corpora.wordnet import WORDNET_LICENCE, Synset, find_wordnet, read_synsets
from eval.scores.metrics import ACCURACY
from eval.source import SystemData, hash_fraction, split_by_hash
from eval.task import SPLITS, TASKS, Decoding, Features, Row, Task, register_task
from eval.text.postprocess import choices_of, number_of_choice
from moe.data.prose import letters
from moe.errors import DataError

NUM_CHOICES = 4
MIN_WORDS = 3
MIN_LETTERS = 3

_NAME = "wordnet_word"
_SPLIT_SALT = "wordnet-word-v1"
_RUN = 4  # letters

_NOT_IN_THE_TEXT = "wordnet_supersense"
"""The task whose tested definitions the text of the studies lacks."""


def _rows(split: str) -> list[Row]:
    return _all_rows()[split]


@lru_cache(maxsize=1)
def _all_rows() -> dict[str, list[Row]]:
    """Returns the rows of every split; each word is in only one split, with one definition."""
    synsets_by_kind: dict[tuple[str, str, bool], list[Synset]] = defaultdict(list)
    for synset in _asked_synsets(read_synsets(find_wordnet())):
        # All choices have the same part of speech, so that it gives nothing away.
        word = synset.words[0]
        split = split_by_hash(f"{_SPLIT_SALT}/{word.lower()}", test=0.055, validation=0.015)
        synsets_by_kind[split, synset.lexicographer, word[0].isupper()].append(synset)

    splits: dict[str, list[Row]] = {split: [] for split in SPLITS}
    for (split, _, _), synsets in synsets_by_kind.items():
        num_asked = len(synsets) // NUM_CHOICES * NUM_CHOICES
        for start in range(0, num_asked, NUM_CHOICES):
            splits[split] += _questions(synsets[start : start + NUM_CHOICES])
    return splits


def _asked_synsets(synsets: Sequence[Synset]) -> Iterator[Synset]:
    """Yields synsets in a random order, the same on every machine, each word once."""
    num_synsets = Counter(letters(synset.definition) for synset in synsets)
    unseen = set()
    for split in ("validation", "test"):
        unseen |= {example.id for example in TASKS.get(_NOT_IN_THE_TEXT).examples(split)}

    words: set[str] = set()
    for synset in sorted(synsets, key=_order):
        word = synset.words[0]
        is_plain = word.isalpha() and len(word) >= MIN_LETTERS and word.lower() not in words
        is_long_enough = len(synset.definition.split()) >= MIN_WORDS
        is_shared = num_synsets[letters(synset.definition)] > 1
        if not is_plain or not is_long_enough or is_shared or synset.id in unseen:
            continue

        # A definition that holds a part of the word can be answered without memory.
        if not _shares_letters(word, synset.definition):
            words.add(word.lower())
            yield synset


def _order(synset: Synset) -> float:
    return hash_fraction(f"{_SPLIT_SALT}/order/{synset.id}")


def _shares_letters(word: str, definition: str) -> bool:
    """Returns whether four consecutive letters of the word also occur in a word of the definition."""
    letters_of_word = word.lower()
    last = max(1, len(letters_of_word) - _RUN + 1)
    text = definition.lower()
    return any(letters_of_word[start : start + _RUN] in text for start in range(last))


def _questions(synsets: Sequence[Synset]) -> Iterator[Row]:
    """Yields a question for each of some synsets, with the words of all of them to choose from."""
    choices = sorted(synset.words[0] for synset in synsets)
    for synset in synsets:
        yield {
            "id": synset.id,
            "part_of_speech": synset.part_of_speech,
            "definition": synset.definition,
            "word": synset.words[0],
            "choices": choices,
        }


def _preprocess(row: Row) -> list[Features]:
    """Returns the example of one definition.

    Raises:
        DataError: When the word is not one of the choices, or two of them are equal.
    """
    choices = row["choices"]
    if row["word"] not in choices or len(set(choices)) < len(choices):
        raise DataError(
            f"The row {row['id']} has the word {row['word']!r} and the choices {choices}; expected "
            "different words, one of them the word."
        )
    return [
        {
            "id": row["id"],
            "document": f"wordnet/{row['id']}",
            "choices": choices,
            "inputs": f"which {row['part_of_speech']} means: {row['definition']}",
            "targets": row["word"],
        }
    ]


register_task(
    Task(
        name=_NAME,
        version=1,
        description=(
            "A definition in WordNet to its word, without a text. Ranked, it is one of "
            f"{NUM_CHOICES} words of one kind, each of them the answer to one of {NUM_CHOICES} "
            "questions, so that chance is 25 %; generated, it is any word. No word is both trained "
            f"and tested; the tested definitions of {_NOT_IN_THE_TEXT} are left out. Needs WordNet "
            "on this system, e.g. Debian's wordnet-base, or rows of your own."
        ),
        licence=WORDNET_LICENCE,
        source=SystemData(
            _rows,
            task=_NAME,
            origin="WordNet on this system",
            columns={
                "id": str,
                "part_of_speech": str,
                "definition": str,
                "word": str,
                "choices": [str],
            },
            labels={},
        ),
        preprocess=_preprocess,
        postprocess=number_of_choice,
        metrics=(ACCURACY,),
        choices=choices_of,
        has_lexical_choices=True,
        ids=("id",),
        groups=("document",),
        inputs_length=128,
        targets_length=16,
        decoding=Decoding(max_tokens=16),
        split="test",
        prompt_source="this library",
    )
)
