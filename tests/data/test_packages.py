"""Packages as text. Oracle: packages written by the test, with metadata as installers write it."""

import inspect
import os
import textwrap
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from eval.corpora.packages import read_packages, stated_licence
from moe.data.docstrings import read_python_corpus
from moe.errors import DataError

MODULE = '''"""Counts the sheep that jump over the fence at night."""


def jump(sheep):
    """Returns the sheep behind the fence, where the grass is greener.

    >>> jump(1)
    1
    """
'''
PAGE = """Counting
========

Sheep are counted one by one, as in ``jump(sheep)``, until everyone sleeps.

.. code-block:: python

   import sheep_counter
"""


def install(site: Path, *, licence: str) -> Path:
    """Makes a package with its metadata, under another name than that of the distribution."""
    package = site / "sheep_counter"
    (package / "tests").mkdir(parents=True)
    (package / "__init__.py").write_text(MODULE, encoding="utf-8")
    (package / "guide.rst").write_text(PAGE, encoding="utf-8")
    (package / "latin.md").write_bytes("Ein Gruß an alle Schafe dieser Welt.".encode("latin1"))
    (package / "tests" / "test_jump.py").write_text(MODULE, encoding="utf-8")

    metadata = site / "counting_sheep-1.0.dist-info"
    metadata.mkdir()
    (metadata / "top_level.txt").write_text("sheep_counter\n", encoding="utf-8")
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: counting-sheep\nVersion: 1.0\n{licence}\n", encoding="utf-8"
    )
    return package


def test_docstrings_and_pages_of_a_package_are_documents_with_its_licence(
    tmp_path, monkeypatch, caplog
):
    install(tmp_path, licence="License-Expression: MIT AND CC0-1.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    documents = read_packages(["sheep_counter", "counting-sheep"])
    assert [document.source for document in documents] == [
        "sheep_counter/__init__.py",
        "sheep_counter/guide.rst",
    ]
    assert documents[0].text == (
        "Counts the sheep that jump over the fence at night.\n\n"
        "Returns the sheep behind the fence, where the grass is greener."
    )
    assert documents[1].text == (
        "Sheep are counted one by one, as in jump(sheep), until everyone sleeps."
    )
    assert {document.licence for document in documents} == {"MIT AND CC0-1.0"}
    assert {document.package for document in documents} == {"sheep_counter"}
    assert "latin.md is not UTF-8" in caplog.text
    assert read_packages(["Counting_Sheep"]) == documents


def test_an_unpacked_source_distribution_is_a_folder(tmp_path, monkeypatch):
    install(tmp_path / "sheep-1.0", licence="")
    (tmp_path / "sheep-1.0" / "PKG-INFO").write_text("Name: sheep\nLicense: ISC\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    documents = read_packages(["./sheep-1.0"])
    assert documents[0].source == "sheep-1.0/sheep_counter/__init__.py"
    assert {document.licence for document in documents} == {"ISC"}


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ("License: Apache-2.0\nLicense-Expression: MIT", "MIT"),
        ("License: BSD", "BSD"),
        ("License: UNKNOWN\nClassifier: License :: OSI Approved :: BSD License", "BSD License"),
        ("License: " + 30 * "all rights " + "\nClassifier: Topic :: Software", "not stated"),
        ("Classifier: License :: OSI Approved", "not stated"),
    ],
)
def test_the_licence_is_what_the_metadata_states(tmp_path, fields, licence):
    (tmp_path / "METADATA").write_text(f"Name: sheep\n{fields}\n", encoding="utf-8")
    assert stated_licence(Distribution.at(tmp_path)) == licence


def test_what_is_no_package_is_refused_and_a_misspelt_one_gets_a_hint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("../numpy.py", "six\n"):
        with pytest.raises(DataError, match=r"not installed as a folder of source|not a folder"):
            read_packages([name])
    with pytest.raises(DataError, match=r"Did you mean 'numpy'\?"):
        read_packages(["nunpy"])
    with pytest.raises(DataError, match="There is no prose in an empty list of packages"):
        read_packages([])


@pytest.mark.slow
def test_the_default_corpus_is_three_packages_with_known_licences_and_without_their_pages():
    default = read_python_corpus()
    assert sum(len(document.text) for document in default) > 5_000_000
    licences = {document.package: document.licence for document in default}
    assert licences == {"stdlib": "PSF-2.0", "torch": "BSD-3-Clause", "numpy": "BSD-3-Clause"}

    by_source = {document.source: document.text for document in default}
    assert len(by_source) == len(default)
    summary = inspect.cleandoc(textwrap.__doc__ or "").splitlines()[0]
    assert by_source["stdlib/textwrap.py"].startswith(summary)
    assert "pydoc_data/topics.py#if" in by_source

    named = {document.source: document.text for document in read_packages(["numpy"])}
    for document in default:
        if document.package == "numpy":
            assert named[document.source] == document.text
    assert not any(document.source.endswith((".rst", ".md")) for document in default)


def test_files_that_no_reader_should_open_are_left_out(tmp_path, caplog):
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "good.py").write_text(MODULE, encoding="utf-8")
    (folder / "deep.py").write_text('"""Deep."""\n' + 100_000 * "-" + "1", encoding="utf-8")
    (folder / "gone.py").symlink_to(folder / "nowhere.py")
    os.mkfifo(folder / "pipe.py")
    os.mkfifo(folder / "pipe.rst")
    (document,) = read_packages([f"{folder}/"])
    assert document.source == "odd/good.py"
    assert "deep.py is left out" in caplog.text
