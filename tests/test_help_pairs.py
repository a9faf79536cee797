"""Pairs of paragraphs from packages that a test made by hand, unpacked and as Debian's archives."""

import io
import tarfile

import pytest

from moe.data.pair_files import read_pairs
from moe.errors import DataError
from scripts import help_pairs

PAGE = '<p dir="auto">LibreOffice Help</p>\n{}<p id="bm_module" dir="auto">calc</p>'
ENGLISH = PAGE.format(
    '<h1 id="hd_1" dir="auto"><a name="x"></a>Cells &amp; rows\n</h1>'
    '<p id="par_1" class="c">Click <span class="emph">OK</span>.</p><p id="par_2">Calc</p>'
    '<p id="par_3">Not translated yet</p><p id="par_4">Close</p>'
)
GERMAN = PAGE.format(
    '<p id="par_1" class="c"><span class="emph">OK</span> anklicken.</p><p id="par_2">Calc</p>'
    '<h1 id="hd_1" dir="auto">Zellen &amp; Zeilen</h1><p id="par_4">  </p>'
)
PAIRS = {("de: Cells & rows", "Zellen & Zeilen"), ("de: Click OK.", "OK anklicken.")}


def write_page(folder, code, text):
    page = folder / f"usr/share/libreoffice/help/{code}/text/scalc/main.html"
    page.parent.mkdir(parents=True)
    page.write_text(text, encoding="utf-8")


def write_package(unpacked, target):
    """Writes a folder as Debian does: an archive of archives, each of an even number of bytes."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz") as archive:
        archive.add(unpacked, arcname=".")
    files = {"debian-binary": b"2.0", "data.tar.xz": content.getvalue()}
    with target.open("wb") as package:
        package.write(b"!<arch>\n")
        for name, data in files.items():
            package.write(f"{name:16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode())
            package.write(data + b"\n" * (len(data) % 2))


@pytest.fixture
def packages(tmp_path):
    """English is unpacked, German a package."""
    write_page(tmp_path / "packages", "en-US", ENGLISH)
    write_page(tmp_path / "german", "de", GERMAN)
    write_package(tmp_path / "german", tmp_path / "packages/libreoffice-help-de_7_all.deb")
    return tmp_path / "packages"


def test_a_pair_is_two_texts_of_one_page_and_id_that_differ(packages, tmp_path, monkeypatch):
    texts = {pair["group"]: pair for pair in help_pairs.help_pairs(packages, ["de"], 100)}
    assert {(pair["inputs"], pair["targets"]) for pair in texts.values()} == PAIRS
    assert texts.keys() == {"Cells & rows", "Click OK."}

    # Of the longer pair, one text has 15 characters.
    (short,) = help_pairs.help_pairs(packages, ["de"], 14)
    assert short["group"] == "Click OK."

    # All files together hold each pair once.
    splits = {"Cells & rows": "dev", "Click OK.": "train"}
    monkeypatch.setattr(help_pairs, "split_of", splits.__getitem__)
    out = tmp_path / "out"
    help_pairs.main(["--packages", str(packages), "--languages", "de", "--out", str(out)])
    for english, split in splits.items():
        (pair,) = read_pairs(out / f"{split}.jsonl")
        assert pair._asdict().items() >= texts[english].items()
    assert (out / "test.jsonl").read_bytes() == b""


def test_shares_of_texts_are_those_declared():
    splits = [help_pairs.split_of(str(number)) for number in range(20_000)]
    assert splits.count("dev") / 20_000 == pytest.approx(help_pairs.DEV_SHARE, abs=0.005)
    assert splits.count("test") / 20_000 == pytest.approx(help_pairs.TEST_SHARE, abs=0.005)


@pytest.mark.parametrize("damage", ["missing", "twice", "cut"])
def test_a_package_that_is_missing_twice_or_damaged_is_named_and_nothing_written(
    packages, tmp_path, damage
):
    (package,) = packages.glob("*.deb")
    content = package.read_bytes()
    if damage == "missing":
        package.unlink()
    elif damage == "twice":
        write_page(packages, "de", GERMAN)
    else:
        package.write_bytes(content[:100])
    out = tmp_path / "out"
    with pytest.raises(DataError, match="libreoffice-help-de"):
        help_pairs.main(["--packages", str(packages), "--languages", "de", "--out", str(out)])
    assert not out.exists()
