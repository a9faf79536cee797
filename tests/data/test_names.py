"""Names of CLDR: which there are, how they are split, and the files of `stmoe names`.

Oracles: names that anybody can look up; sets of the rows that were written.
"""

import json
import sys
from collections import Counter

import pytest

from moe import ConfigError, DataError
from moe.commands import names as names_command
from moe.data.names import (
    FAMILIES,
    LANGUAGES,
    LEAST_NAMES,
    NEW,
    SPLITS,
    all_names,
    by_family,
    english_name,
    family_of,
    read_names,
)
from moe.data.pair_files import read_pairs


def write(out, *argv):
    names_command.main([*map(str, argv), "--out", str(out)])
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("names") / "names"
    return write(out, "--languages", "el", "bg", "mk", "--new", "mk", "--few", 7)


# ---- names ----


def test_names_are_those_that_people_of_a_language_use():
    names = all_names()
    assert names["el"]["Côte d\u2019Ivoire"] == "Ακτή Ελεφαντοστού"
    assert names["de"]["Germany"] == "Deutschland"
    assert names["ja"]["Japan"] == "日本"
    assert names["sw"]["Greek"] == "Kigiriki"
    assert names["sr_Latn"]["Cyrillic"] == "ćirilica" != names["sr"]["Cyrillic"]
    assert names["tr"]["Turkish Lira"] == "Türk liras\u0131"


def test_languages_have_enough_names_and_each_is_there_once():
    names = all_names()
    assert len(names) == 157
    assert min(map(len, names.values())) >= LEAST_NAMES
    assert not {"en", "root", "nb", "de_AT", "pt_PT"} & names.keys()
    assert {*LANGUAGES, *NEW} <= names.keys()
    for by_english in names.values():
        assert all(english.strip() and name.strip() for english, name in by_english.items())


def test_every_language_has_a_family_and_a_name():
    codes = Counter(" ".join(FAMILIES.values()).split())
    assert codes == Counter(list(all_names()))
    assert (family_of("ccp"), family_of("zh_Hant")) == ("Indo-Aryan", "Sino-Tibetan")
    assert by_family(["tlh", "fi", "de", "hu", "nl"]) == ["de", "nl", "fi", "hu", "tlh"]
    assert family_of("tlh") == "Other"
    english = [english_name(code) for code in all_names()]
    assert len(set(english)) == 157 and "None" not in english
    assert (english_name("lld"), english_name("sr_Latn")) == ("Ladin", "Serbian (Latin)")


def test_a_split_is_the_same_in_every_subset_of_languages():
    subset = {(name.language, name.english): name.split for name in read_names(["bg", "el"])}
    others = {(name.language, name.english): name.split for name in read_names(["el", "de"])}
    shared = subset.keys() & others.keys()
    assert len(shared) == len(all_names()["el"])
    assert all(subset[key] == others[key] for key in shared)
    assert [name for name in read_names(["el"]) if name.split == "test"] == read_names(
        ["el"], "test"
    )


@pytest.mark.slow
def test_the_splits_of_the_published_models_and_study_do_not_change():
    for languages, sizes in ((LANGUAGES, [13_824, 305, 914]), (None, [153_209, 3_383, 10_161])):
        counts = Counter(name.split for name in read_names(languages))
        assert [counts[split] for split in SPLITS] == sizes


def test_without_babel_one_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "babel", None)
    with pytest.raises(DataError, match=r"Babel.*pip install 'stmoe\[eval\]'"):
        all_names.__wrapped__()


# ---- files ----


def test_the_files_hold_every_name_once_and_the_new_language_apart(folder):
    names = read_names(["el", "bg"])
    parts = {path.stem: read_pairs(path) for path in folder.glob("*.jsonl")}
    rows = [*parts["train"], *parts["dev"], *parts["test"]]
    assert sorted(row[:3] for row in rows) == sorted(
        (name.inputs, name.name, name.english) for name in names
    )
    assert rows[0].inputs.startswith("el: ")
    assert set(parts["seen"]) <= set(parts["train"])
    assert len(parts["seen"]) == min(len(parts["train"]), 2_000)

    new = [*parts["new-mk-train"], *parts["new-mk-test"]]
    assert len(parts["new-mk-train"]) == 7
    assert len(set(new)) == len(new) == len(read_names(["mk"], "train"))
    assert not any(pair.inputs.startswith("mk: ") for pair in rows)


def test_the_folder_names_its_languages_and_the_licence(folder):
    languages = json.loads((folder / "languages.json").read_text())["languages"]
    assert languages == {
        "bg": {"name": "Bulgarian", "family": "Slavic"},
        "el": {"name": "Greek", "family": "Greek"},
    }
    assert (folder / "LICENSE").read_text().startswith("UNICODE LICENSE V3")


def test_the_folder_is_replaced_and_another_one_is_left_alone(folder, tmp_path):
    out = write(tmp_path / "names", "--languages", "ka", "--new")
    assert not list(out.glob("new-*"))
    write(out, "--languages", "ka", "--new", "mk", "--few", 7)
    for name in ("new-mk-train.jsonl", "new-mk-test.jsonl"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="mine"):
        write(tmp_path / "mine", "--languages", "ka")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


@pytest.mark.slow
def test_all_languages_but_the_new_ones_are_written(tmp_path):
    out = write(tmp_path / "names", "--languages", "all")
    languages = json.loads((out / "languages.json").read_text())["languages"]
    assert languages.keys() == all_names().keys() - set(NEW)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--languages", "el", "klingon"], "'klingon' is not a language.*--list"),
        (["--languages", "el", "--new", "mkd"], "'mkd' is not a language.*'mk'"),
        (["--languages", "el", "--new", "mk", "el"], "--new mk el holds out all"),
        (["--languages", "el", "--new", "mk", "--few", 5_000], "--few 5000 leaves no name of mk"),
    ],
)
def test_what_cannot_be_written_is_one_message_and_nothing_is_left(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        write(tmp_path / "names", *options)
    assert list(tmp_path.iterdir()) == []


def test_languages_are_listed_by_family_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names_command.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 157
    assert lines.index("af         Afrikaans, Germanic") < lines.index("br         Breton, Celtic")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"--out is missing.*--list"):
        names_command.main([])
