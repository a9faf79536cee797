"""Dictionaries in the format of dictd, as Debian installs them: headwords with their definitions.

Pronunciation, etymology, labels and sources are left out; the English text is kept. The rules
follow GCIDE, the largest free dictionary of English; other dictionaries of the format have less
markup.

Source:
    dictd 1.13, dictfmt(1): a file of definitions (.dict, or .dict.dz, which gzip reads) and an
    index of tab-separated headword, offset and length, the numbers in base 64. Differs: no.
"""

import gzip
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moe.checks import shown
from moe.data.documents import OWN_LICENCE, Document
from moe.data.prose import is_prose
from moe.errors import DataError
from moe.parsing import printable, read_text, reading

SYSTEM_DICTIONARY = Path("/usr/share/dictd/gcide.index")
_TEXT_SUFFIXES = (".dict", ".dict.dz")
_ABOUT = re.compile(r"00-?database")
_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_VALUES = {digit: value for value, digit in enumerate(_DIGITS)}

_GPL = re.compile(r"GNU General Public License.{0,120}?either version (\d)", re.DOTALL)

# Abbreviated parts of speech in headers.
_PART_OF_SPEECH = re.compile(r"(n|a|adj|adv|v|prep|conj|interj|pron)\.")
_NAMES = {
    "n": "noun",
    "a": "adjective",
    "adj": "adjective",
    "adv": "adverb",
    "v": "verb",
    "prep": "preposition",
    "conj": "conjunction",
    "interj": "interjection",
    "pron": "pronoun",
}

_PRONUNCIATION = re.compile(r"\s*\\(.*)\\(?:\s*\([^)]*\))?")
_SENSE_NUMBER = re.compile(r"(?:\d+\.|\([a-z]\))\s+")
_FIELD_LABEL = re.compile(r"(?:\([A-Z][^()]{0,30}\.\)\s*)+")
_ATTRIBUTION = re.compile(r"\s*--\s?[A-Z(][^-]{0,60}$")
_SYNONYMS = re.compile(r"Syn[.:]")
_WORDNET_TAG = re.compile(r"\[[^][]*WordNet[^][]*\]")
_EDITOR_TAG = re.compile(r"\[[^][]*(?:Webster|WordNet|PJC|RHUD|Century)[^][]*\]")

# [ae] and ['e] inside a word are characters; elsewhere brackets hold labels and etymologies.
_CHARACTER = re.compile(r"(?<=\w)\[([^][\s]{1,5})\]|\[([^][\s]{1,5})\](?=[a-z])")
_BRACKETS = re.compile(r"\s*\[[^][]*\]")
_NAMED_CHARACTERS = {
    "imac": "i",
    "aum": "a",
    "asl": "a",
    "add": "a",
    "udd": "u",
    "eth": "th",
    "thorn": "th",
    "yogh": "g",
    "deg": " degrees",
}


class _Entry(NamedTuple):
    """Position of the text of a headword."""

    offset: int
    length: int
    headword: str


def find_dictionary(file: Path | None = None) -> Path:
    """Returns the index of a dictionary.

    Args:
        file: The index, or the definitions in the same folder; None for GCIDE of the system.

    Raises:
        DataError: When there is no such file, or the other one is missing.
    """
    if file is None:
        if not SYSTEM_DICTIONARY.is_file():
            raise DataError(
                f"There is no {SYSTEM_DICTIONARY}. Install it, e.g. `apt-get install dict-gcide`, "
                "or name the .index file of another dictionary of dictd."
            )
        return SYSTEM_DICTIONARY

    # The index and the definitions have the same name with different endings.
    stem = file.name
    for suffix in (".index", ".dict.dz", ".dict"):
        stem = stem.removesuffix(suffix)
    index = file.with_name(f"{stem}.index")
    if not file.is_file() or not index.is_file():
        raise DataError(
            f"{file} is not a dictd dictionary: there is no {file if not file.is_file() else index}. Give NAME.index "
            "with NAME.dict or NAME.dict.dz beside it."
        )
    return index


def read_dictionary(index: Path) -> list[Document]:
    """Returns a document per entry of a dictionary: the headword with its definitions.

    This omits pronunciation, etymology, labels, lists of synonyms, and entries taken from WordNet,
    which is a separate source.

    Args:
        index: See `find_dictionary`.

    Raises:
        DataError: When a file cannot be read, or the two do not belong together.
    """
    definitions = _read_definitions(index)
    entries = list(_read_index(index, len(definitions)))

    # The entries about the dictionary itself state its licence.
    about = ""
    for entry in entries:
        if _ABOUT.match(entry.headword):
            about += _text_of(entry, definitions)
    licence = stated_licence(about)

    # Several headwords may share one text; it belongs to the first of them.
    entries_by_offset: dict[int, _Entry] = {}
    for entry in entries:
        if not _ABOUT.match(entry.headword):
            entries_by_offset.setdefault(entry.offset, entry)

    name = printable(index.stem)
    documents = []
    for _, entry in sorted(entries_by_offset.items()):
        headword, paragraphs = entry_paragraphs(_text_of(entry, definitions), entry.headword)
        if paragraphs:
            source = f"{name}/{printable(headword)}"
            documents.append(Document("\n\n".join(paragraphs), source, name, licence))
    if not documents:
        raise DataError(f"{index} has no entry with English text. Give another dictionary.")
    return documents


def stated_licence(about: str) -> str:
    """Returns the licence that is stated in a dictionary's own entries, or "not stated"."""
    gpl = _GPL.search(about)
    return f"GPL-{gpl[1]}.0-or-later" if gpl else OWN_LICENCE


def _read_definitions(index: Path) -> bytes:
    """Returns the content of the file of definitions."""
    names = [index.stem + suffix for suffix in _TEXT_SUFFIXES]
    for name in names:
        path = index.with_name(name)
        if not path.is_file():
            continue
        with reading(path, advice="Install it again."):
            return gzip.open(path).read() if path.suffix == ".dz" else path.read_bytes()
    raise DataError(f"Beside {index} lies neither {' nor '.join(names)}. Put it there.")


def _read_index(index: Path, num_bytes: int) -> Iterator[_Entry]:
    """Yields the headwords, each with its position in a text of the given size."""
    text = read_text(index, advice="Give the .index file of a dictionary.")
    for number, line in enumerate(text.split("\n"), start=1):
        if not line:
            continue
        try:
            headword, offset, length, *_ = line.split("\t")
            entry = _Entry(_base_64(offset), _base_64(length), headword)
        except (ValueError, KeyError) as error:
            raise DataError(
                f"{index}, line {number}: {shown(line[:60])} is not a headword with offset and length. Give the "
                ".index file of a dictionary of dictd."
            ) from error
        if entry.offset + entry.length > num_bytes:
            raise DataError(
                f"{index}, line {number}: {shown(headword)} ends at byte {entry.offset + entry.length:,}, but the "
                f"definitions have {num_bytes:,}. Use two files of the same dictionary."
            )
        yield entry


def _base_64(text: str) -> int:
    """Returns a number in dictd's base 64, the highest digit first."""
    number = 0
    for digit in text:
        number = 64 * number + _VALUES[digit]
    return number


def _text_of(entry: _Entry, definitions: bytes) -> str:
    content = definitions[entry.offset : entry.offset + entry.length]
    try:
        return content.decode()
    except UnicodeDecodeError:  # older dictionaries
        return content.decode("cp1252", errors="replace")


def entry_paragraphs(text: str, headword: str) -> tuple[str, list[str]]:
    """Returns the headword of an entry and its paragraphs; the first begins with the headword.

    Args:
        text: The entry.
        headword: Headword from the index, for texts without it in their first line.
    """
    header, body = _split_header(text.strip("\n"))
    part_of_speech = ""
    pronunciation = _PRONUNCIATION.search(header)
    if pronunciation:
        headword = header[: pronunciation.start()].strip() or headword
        match = _PART_OF_SPEECH.match(header[pronunciation.end() :].lstrip(", "))
        part_of_speech = f" ({_NAMES[match[1]]})" if match else ""

    paragraphs = []
    for paragraph in _own_paragraphs(body):
        english = _without_markup(paragraph)
        # The first paragraph begins with the headword.
        if not paragraphs:
            english = f"{headword}{part_of_speech}: {english}"
        if is_prose(english):
            paragraphs.append(english)
    return headword, paragraphs


def _split_header(text: str) -> tuple[str, str]:
    """Returns the lines with headword, pronunciation and etymology, and the lines that follow."""
    lines = text.split("\n")
    depth = 0
    for number, line in enumerate(lines):
        depth += line.count("[") - line.count("]")
        if depth <= 0 or not line.strip():
            return " ".join(lines[: number + 1]), "\n".join(lines[number + 1 :])
    return text, ""


def _own_paragraphs(body: str) -> Iterator[str]:
    """Yields the paragraphs that are neither from WordNet nor lists of synonyms, one line each.

    A tag like [1913 Webster] gives the source of the paragraphs above it.
    """
    untagged: list[str] = []
    for block in re.split(r"\n\s*\n", body):
        paragraph = " ".join(block.split())
        if not _SYNONYMS.match(paragraph):
            untagged.append(paragraph)

        # A tag names the source of this paragraph and those above.
        if _WORDNET_TAG.search(paragraph):
            untagged = []
        elif _EDITOR_TAG.search(paragraph):
            yield from untagged
            untagged = []
    yield from untagged


def _without_markup(paragraph: str) -> str:
    """Returns a paragraph without number, labels, brackets, braces and the name of an author."""
    text = _CHARACTER.sub(_plain_character, paragraph)
    text = _BRACKETS.sub("", _BRACKETS.sub("", text))
    text = text.replace("{", "").replace("}", "").strip()

    text = _SENSE_NUMBER.sub("", text, count=1) if _SENSE_NUMBER.match(text) else text
    field_label = _FIELD_LABEL.match(text)
    if field_label:
        text = text[field_label.end() :]
    return _ATTRIBUTION.sub("", text)


def _plain_character(match: re.Match[str]) -> str:
    """Returns a bracketed character without its accents: `['e]` -> `e`."""
    name = match[1] or match[2]
    plain = "".join(filter(str.isalnum, name))
    return _NAMED_CHARACTERS.get(name, plain)
