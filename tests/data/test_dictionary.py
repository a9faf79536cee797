"""Dictionaries of dictd. Oracle: entries copied from GCIDE, put into files by the test."""

import gzip
from pathlib import Path

import pytest

from eval.corpora import dictionary
from eval.corpora.dictionary import entry_paragraphs, find_dictionary, read_dictionary
from moe.errors import DataError

ABOUT = """00-database-info
   GCIDE is free software; you can redistribute it and/or modify it
   under the terms of the GNU General Public License as published
   by the Free Software Foundation; either version 2, or (at your
   option) any later version.
"""
DOG = r"""Dog \Dog\ (d[add]g or d[o^]g), n. [AS. docga; akin to D. dog
   mastiff, Dan. dogge [, Sw.] dogg.]
   1. (Zool.) A quadruped of the genus {Canis}, esp. the
      domestic dog, with antenn[ae] in caf['e]s. [Obs.]
      [1913 Webster]

            Out, damned dog that barks at night! --Shak.
      [1913 Webster]

   2. a member of the genus Canis that has been domesticated.
      [WordNet 1.5]

   Syn: hound, cur, mutt, tyke, whelp
        [PJC]

"""
RUN = r"""Run \Run\, v. i.
   To move swiftly on foot, as a hare or a dog does.
   [1913 Webster]
"""
EMPTY = r"""Nil \Nil\, n.
   Nothing.
   [WordNet 1.5 +PJC]
"""
DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def base_64(number: int) -> str:
    return (base_64(number // 64) if number >= 64 else "") + DIGITS[number % 64]


def write(folder: Path, entries: dict[str, bytes], *, zipped: bool = False) -> Path:
    """Writes a dictionary and returns its index."""
    content = b""
    index = ""
    for headwords, entry in entries.items():
        for headword in headwords.split("|"):
            index += f"{headword}\t{base_64(len(content))}\t{base_64(len(entry))}\n"
        content += entry
    (folder / "small.index").write_text(index, encoding="utf-8")
    if zipped:
        (folder / "small.dict.dz").write_bytes(gzip.compress(content))
    else:
        (folder / "small.dict").write_bytes(content)
    return folder / "small.index"


ENTRIES = {
    "00-database-info": ABOUT.encode(),
    "dog|damned": DOG.encode(),
    "run": RUN.encode(),
    "nil": EMPTY.encode(),
}


@pytest.mark.parametrize("zipped", [False, True])
def test_an_entry_is_a_document_of_plain_english(tmp_path, zipped):
    dog, run = read_dictionary(write(tmp_path, ENTRIES, zipped=zipped))
    assert dog == (
        "Dog (noun): A quadruped of the genus Canis, esp. the domestic dog, with antennae in "
        "cafes.\n\nOut, damned dog that barks at night!",
        "small/Dog",
        "small",
        "GPL-2.0-or-later",
    )
    assert run.text == "Run (verb): To move swiftly on foot, as a hare or a dog does."


def test_an_entry_in_another_style_keeps_its_headword_from_the_index():
    text = "foo bar\n\n   <jargon> The {canonical} pair of names.\n\n   Both are used.\n"
    headword, paragraphs = entry_paragraphs(text, "foo bar")
    assert headword == "foo bar"
    assert paragraphs == ["foo bar: <jargon> The canonical pair of names."]


def test_older_encodings_are_read_and_no_licence_is_made_up(tmp_path):
    entry = "Café\n   A house where coffee is sold to Dog\x92s friends.\n".encode("latin1")
    (document,) = read_dictionary(write(tmp_path, {"café": entry}))
    assert "Dog\u2019s friends" in document.text
    assert document.licence == "not stated"


def test_the_system_dictionary_or_either_file_is_found(tmp_path, monkeypatch):
    index = write(tmp_path, ENTRIES, zipped=True)
    assert find_dictionary(index) == find_dictionary(tmp_path / "small.dict.dz") == index
    monkeypatch.setattr(dictionary, "SYSTEM_DICTIONARY", index)
    assert find_dictionary() == index
    monkeypatch.setattr(dictionary, "SYSTEM_DICTIONARY", tmp_path / "none.index")
    with pytest.raises(DataError, match=r"none\.index.* `apt-get install dict-gcide`"):
        find_dictionary()
    with pytest.raises(DataError, match=r"is not a dictd dictionary: there is no .*other\.dict"):
        find_dictionary(tmp_path / "other.dict")
    index.unlink()
    with pytest.raises(DataError, match=r"there is no .*small\.index\. Give NAME\.index"):
        find_dictionary(tmp_path / "small.dict.dz")


def test_a_broken_index_names_the_line_or_the_lack_of_entries(tmp_path):
    index = write(tmp_path, ENTRIES)
    for line in ("dog", "dog\tA", "dog\tA\t?", "dog\tA\tzzz", ""):
        index.write_text(line + "\n", encoding="utf-8")
        with pytest.raises(DataError, match=r"small\.index(, line 1: | has no entry with)"):
            read_dictionary(index)


def test_broken_and_missing_definitions_are_refused(tmp_path):
    index = write(tmp_path, ENTRIES, zipped=True)
    zipped = tmp_path / "small.dict.dz"
    zipped.write_bytes(zipped.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"small\.dict\.dz cannot be read: .* Install it again"):
        read_dictionary(index)
    zipped.write_bytes(b"no gzip at all")
    with pytest.raises(DataError, match=r"small\.dict\.dz cannot be read"):
        read_dictionary(index)
    zipped.unlink()
    with pytest.raises(DataError, match=r"lies neither small\.dict nor small\.dict\.dz"):
        read_dictionary(index)
