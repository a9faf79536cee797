"""Rows of packages are read once, and again when a file changes."""

import pytest

from eval.corpora import kept_rows
from eval.corpora.kept_rows import kept_on_disk


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of one file, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_rows, "package_folder", lambda name: tmp_path / name)
    (tmp_path / "sheep").mkdir()
    (tmp_path / "sheep/a.py").write_text("1")
    return tmp_path / "sheep"


def test_rows_are_read_once_until_a_file_changes_or_what_is_kept_is_damaged(package, tmp_path):
    calls = []

    @kept_on_disk("sheep")
    def read():
        calls.append(1)
        text = (package / "a.py").read_text()
        return {"train": [{"id": "ä", "text": text}], "test": []}

    expected = read()
    assert read() == expected
    assert len(calls) == 1

    (package / "a.py").write_text("22")
    assert read() == {"train": [{"id": "ä", "text": "22"}], "test": []}
    assert len(calls) == 2

    for path in (tmp_path / "cache").rglob("*.json"):
        path.write_text(path.read_text()[:-3])
    read()
    assert len(calls) == 3

    # A folder that cannot be written.
    (tmp_path / "cache").rename(tmp_path / "other")
    (tmp_path / "cache").touch()
    assert read() == read()
    assert len(calls) == 5
