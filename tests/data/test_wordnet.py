"""WordNet's files. Oracle: lines written by hand after wndb(5WN); the system's own WordNet."""

from pathlib import Path

import pytest

from eval.corpora import wordnet
from eval.corpora.wordnet import LEXICOGRAPHER_FILES, find_wordnet, read_synsets, split_gloss
from moe.errors import DataError

LICENCE = "  1 This software and database is being provided to you, the LICENSEE, by  \n"
DOG = (
    "02084071 05 n 03 dog 0 domestic_dog 0 Canis_familiaris 0 001 @ 02083346 n 0000 "
    '| a member of the genus Canis; occurs in many breeds; "the dog barked all night"  \n'
)
RUN = (
    "01926311 38 v 01 run 0 001 @ 01835496 v 0000 02 + 01 00 + 02 00 | move fast by using one's "
    'feet; "Don\'t run--you\'ll be out of breath"; "The children ran to the store"  \n'
)
ASLEEP = "00187736 00 s 01 asleep(p) 0 000 | in a state of sleep  \n"
ABLE = "00001740 44 a 02 able 0 capable(a) 4 000 | having the necessary means  \n"
FAST = '00086000 02 r 01 fast 0 000 | quickly or rapidly: "he works fast"  \n'


@pytest.fixture
def small_wordnet(tmp_path: Path) -> Path:
    contents = {"noun": DOG, "verb": RUN, "adj": ASLEEP + ABLE, "adv": FAST}
    for name, lines in contents.items():
        (tmp_path / f"data.{name}").write_text(LICENCE + lines, encoding="utf-8")
    return tmp_path


def test_a_line_becomes_words_a_definition_and_examples(small_wordnet):
    dog, run, asleep, able, fast = read_synsets(small_wordnet)
    assert dog == (
        "data.noun#02084071",
        "noun",
        "noun.animal",
        ("dog", "domestic dog", "Canis familiaris"),
        "a member of the genus Canis; occurs in many breeds",
        ("the dog barked all night",),
    )
    assert run.lexicographer == "verb.motion"
    assert run.examples == ("Don't run--you'll be out of breath", "The children ran to the store")
    assert (asleep.words, asleep.part_of_speech) == (("asleep",), "adjective")
    assert (able.words, able.lexicographer) == (("able", "capable"), "adj.ppl")
    assert (fast.definition, fast.part_of_speech) == ("quickly or rapidly", "adverb")


@pytest.mark.parametrize(
    ("gloss", "definition", "examples"),
    [
        ('killed; as in "slain warriors"; "a dragon"', 'killed; as in "slain warriors"', 1),
        ('to live; "I am"- R. Descartes; "it is"', "to live", 2),
        ('of Greece; "classical   ', "of Greece", 1),
        ("a plain one; in two parts;", "a plain one; in two parts", 0),
        ('(e.g., "he said")', '(e.g., "he said")', 0),
    ],
)
def test_only_quotations_behind_the_definition_are_examples(gloss, definition, examples):
    assert split_gloss(gloss)[0] == definition
    assert len(split_gloss(gloss)[1]) == examples


def test_the_folder_is_the_one_given_or_named_by_the_environment_or_the_systems(
    small_wordnet, tmp_path_factory, monkeypatch
):
    archive = tmp_path_factory.mktemp("archive")
    small_wordnet.rename(archive / "dict")
    assert find_wordnet(archive) == find_wordnet(archive / "dict") == archive / "dict"

    monkeypatch.setenv("WNSEARCHDIR", str(archive))
    assert find_wordnet() == archive / "dict"
    monkeypatch.delenv("WNSEARCHDIR")
    monkeypatch.setattr(wordnet, "SYSTEM_FOLDERS", (Path("/nowhere"), archive))
    assert find_wordnet() == archive / "dict"


def test_a_missing_wordnet_says_how_to_get_it(tmp_path, monkeypatch):
    (tmp_path / "data.noun").touch()
    with pytest.raises(DataError, match=r"data\.verb, data\.adj, data\.adv are missing\. Name the"):
        find_wordnet(tmp_path)
    monkeypatch.setenv("WNSEARCHDIR", str(tmp_path))
    with pytest.raises(DataError, match=r"\(named by WNSEARCHDIR\) does not hold"):
        find_wordnet()
    monkeypatch.delenv("WNSEARCHDIR")
    monkeypatch.setattr(wordnet, "SYSTEM_FOLDERS", (tmp_path,))
    with pytest.raises(DataError, match=r"is in none of .*`apt-get install wordnet-base`"):
        find_wordnet()


def test_a_broken_line_is_named_and_a_file_without_synsets_refused(small_wordnet):
    lines = ["hello", DOG.split("|", maxsplit=1)[0] + "|  "]
    # No such lexicographer file, part of speech, or number of words.
    for numbers in ("45 n 03", "-1 n 03", "05 x 03", "05 n ff", "05 n 00"):
        lines.append(DOG.replace("05 n 03", numbers))
    for line in lines:
        (small_wordnet / "data.verb").write_text(LICENCE + RUN + line + "\n", encoding="utf-8")
        with pytest.raises(DataError, match=r"data\.verb, line 3: .* is not a WordNet 3 synset"):
            read_synsets(small_wordnet)

    (small_wordnet / "data.verb").write_text(LICENCE, encoding="utf-8")
    with pytest.raises(DataError, match=r"data\.verb holds no synset"):
        read_synsets(small_wordnet)


@pytest.mark.slow
def test_the_systems_wordnet_is_read_whole():
    try:
        folder = find_wordnet()
    except DataError:
        pytest.skip("WordNet is not installed here")
    synsets = read_synsets(folder)
    assert len({synset.id for synset in synsets}) == len(synsets) > 115_000
    assert {synset.lexicographer for synset in synsets} == set(LEXICOGRAPHER_FILES)
    assert all(synset.definition and all(synset.examples) for synset in synsets)
