"""WordNet's synsets, read from the files of its database: words, a definition, examples.

A synset is a set of words with one meaning. No other library is needed.

Source:
    WordNet 3.0, manual pages wndb(5WN) and lexnames(5WN). Differs: relations between synsets are
    not read.
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from moe.checks import shown
from moe.data.documents import Document
from moe.errors import DataError
from moe.parsing import read_text

WORDNET_LICENCE = "WordNet-3.0"
DATA_FILES = ("data.noun", "data.verb", "data.adj", "data.adv")
FOLDER_VARIABLE = "WNSEARCHDIR"
"""Environment variable by which WordNet's own programs find the folder."""

SYSTEM_FOLDERS = (
    Path("/usr/share/wordnet"),
    Path("/usr/share/wordnet-3.0"),
    Path("/usr/local/WordNet-3.0"),
    Path("/opt/homebrew/opt/wordnet"),
    Path("/usr/local/opt/wordnet"),
)

LEXICOGRAPHER_FILES = (
    "adj.all",
    "adj.pert",
    "adv.all",
    "noun.Tops",
    "noun.act",
    "noun.animal",
    "noun.artifact",
    "noun.attribute",
    "noun.body",
    "noun.cognition",
    "noun.communication",
    "noun.event",
    "noun.feeling",
    "noun.food",
    "noun.group",
    "noun.location",
    "noun.motive",
    "noun.object",
    "noun.person",
    "noun.phenomenon",
    "noun.plant",
    "noun.possession",
    "noun.process",
    "noun.quantity",
    "noun.relation",
    "noun.shape",
    "noun.state",
    "noun.substance",
    "noun.time",
    "verb.body",
    "verb.change",
    "verb.cognition",
    "verb.communication",
    "verb.competition",
    "verb.consumption",
    "verb.contact",
    "verb.creation",
    "verb.emotion",
    "verb.motion",
    "verb.perception",
    "verb.possession",
    "verb.social",
    "verb.stative",
    "verb.weather",
    "adj.ppl",
)
"""By number, the files in which lexicographers wrote the synsets; for nouns and verbs these are
the supersenses."""

# A satellite is an adjective whose meaning is close to that of another one.
_PARTS_OF_SPEECH = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}

_ADJECTIVE_MARKER = re.compile(r"\((?:a|p|ip)\)$")
# The definition ends at a quotation after a punctuation mark, but not after "e.g.," or "as in".
_FIRST_EXAMPLE = re.compile(r'(?:(?<=[;:)])|(?<=[^.],))\s*"')
_EXAMPLE = re.compile(r'"([^"]+)(?:"|$)')


class Synset(NamedTuple):
    """Words with one meaning.

    Attributes:
        id: File and offset, e.g. "data.noun#00001740"; the same wherever this version is installed.
        part_of_speech: "noun", "verb", "adjective" or "adverb".
        lexicographer: One of `LEXICOGRAPHER_FILES`, e.g. "noun.animal".
        words: At least one, the most frequent first, e.g. ("dog", "domestic dog").
        definition: Their meaning.
        examples: Phrases or sentences in which they are used; often none.
    """

    id: str
    part_of_speech: str
    lexicographer: str
    words: tuple[str, ...]
    definition: str
    examples: tuple[str, ...]


def find_wordnet(folder: Path | None = None) -> Path:
    """Returns the folder of WordNet's data files.

    Args:
        folder: Holds the data files, or a folder `dict` with them, as WordNet's archives do. None
            uses the folder in the environment variable WNSEARCHDIR, or else the system's.

    Raises:
        DataError: When a data file is missing there, or no folder is given and none is found.
    """
    # An archive of WordNet holds the files in a folder `dict`.
    named = folder or os.environ.get(FOLDER_VARIABLE)
    candidates = [Path(named)] if named else SYSTEM_FOLDERS
    for candidate in candidates:
        for data_folder in (candidate, candidate / "dict"):
            if not _missing_files(data_folder):
                return data_folder

    # The message names the given folder, or the searched locations.
    if named:
        origin = "" if folder else f" (named by {FOLDER_VARIABLE})"
        missing = ", ".join(_missing_files(Path(named)))
        raise DataError(
            f"{named}{origin} does not hold WordNet's database: {missing} are missing. Name the "
            "folder that holds them, or name none and run `apt-get install wordnet-base`."
        )
    searched = ", ".join(map(str, SYSTEM_FOLDERS))
    raise DataError(
        f"WordNet is in none of {searched}. Install it, e.g. `apt-get install wordnet-base`; or "
        "unpack https://wordnetcode.princeton.edu/3.0/WNdb-3.0.tar.gz and name its folder, by "
        f"option or by the environment variable {FOLDER_VARIABLE}."
    )


def _missing_files(folder: Path) -> list[str]:
    return [name for name in DATA_FILES if not (folder / name).is_file()]


def read_synsets(folder: Path) -> list[Synset]:
    """Returns the synsets of WordNet 3.x: nouns, verbs, adjectives, adverbs, in the files' order.

    Args:
        folder: Holds the data files; see `find_wordnet`.

    Raises:
        DataError: When a file cannot be read, has no synset, or a line cannot be parsed; names the line.
    """
    # Otherwise a file truncated after its licence would go unnoticed.
    synsets = []
    for name in DATA_FILES:
        path = folder / name
        num_before = len(synsets)
        synsets += _read_data_file(path)
        if len(synsets) == num_before:
            raise DataError(f"{path} holds no synset. Install WordNet again, or name its folder.")
    return synsets


def _read_data_file(path: Path) -> Iterator[Synset]:
    text = read_text(path, advice="Name the folder of WordNet's database.")
    for number, line in enumerate(text.split("\n"), start=1):
        # Each line of the licence above begins with two spaces.
        if not line.strip() or line.startswith("  "):
            continue

        try:
            yield _parse_synset(path.name, line)
        except (ValueError, IndexError, KeyError) as error:
            raise DataError(
                f"{path}, line {number}: {shown(line[:60])} is not a WordNet 3 synset. Install WordNet again, or name "
                "the folder of its database."
            ) from error


def _parse_synset(file: str, line: str) -> Synset:
    """Returns the synset of a line.

    Raises:
        ValueError: When it has another form; so IndexError and KeyError.
    """
    # offset lexicographer type count word id word id ... | gloss
    fields, _, gloss = line.partition("|")
    offset, lexicographer, kind, count, *rest = fields.split(" ")
    if len(offset) != 8 or not offset.isdecimal() or not gloss.strip():
        raise ValueError(line)

    # The words alternate with numbers that distinguish their meanings.
    words = []
    for index in range(int(count, 16)):
        word = _ADJECTIVE_MARKER.sub("", rest[2 * index])
        words.append(word.replace("_", " "))
    if not all(words) or not words:
        raise ValueError(line)

    definition, examples = split_gloss(gloss)
    return Synset(
        id=f"{file}#{offset}",
        part_of_speech=_PARTS_OF_SPEECH[kind],
        lexicographer=_lexicographer_file(lexicographer),
        words=tuple(words),
        definition=definition,
        examples=examples,
    )


def _lexicographer_file(number: str) -> str:
    """Returns the name of a lexicographer file; raises an IndexError if there is none."""
    if not number.isdecimal():
        raise ValueError(number)
    return LEXICOGRAPHER_FILES[int(number)]


def split_gloss(gloss: str) -> tuple[str, tuple[str, ...]]:
    """Returns the definition in a gloss, and the quoted examples after it, without their authors."""
    gloss = " ".join(gloss.split())
    first_example = _FIRST_EXAMPLE.search(gloss)
    if first_example is None:
        return gloss.rstrip("; "), ()

    # A quotation may lack its last mark; text between two quotations names an author.
    definition = gloss[: first_example.start()].rstrip(";:, ")
    examples = []
    for quotation in _EXAMPLE.findall(gloss, first_example.start()):
        example = quotation.strip("; ")
        if example:
            examples.append(example)
    return definition, tuple(examples)


def wordnet_documents(synsets: Iterable[Synset]) -> list[Document]:
    """Returns a document per synset: its words, their definition, and the examples.

    The source is "wordnet/" with the synset's id, e.g. "wordnet/data.noun#02084071".
    """
    documents = []
    for synset in synsets:
        # As in a dictionary: dog, domestic dog (noun): a member of the genus Canis. ...
        words = ", ".join(synset.words)
        sentences = [f"{words} ({synset.part_of_speech}): {synset.definition}"]
        for example in synset.examples:
            sentences.append(example[:1].upper() + example[1:])

        text = " ".join(map(_closed_sentence, sentences))
        documents.append(Document(text, f"wordnet/{synset.id}", "wordnet", WORDNET_LICENCE))
    return documents


def _closed_sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
