"""Folders that are whole or as they were, whatever moment a run is killed at."""

from pathlib import Path

import pytest

from moe import DataError
from moe.data.storage import read_json_lines, whole_folder


def fill(target, text):
    with whole_folder(target, marker="marker") as partial:
        (partial / "marker").write_text(text)


def test_a_run_killed_between_the_two_renames_loses_nothing(tmp_path):
    target = tmp_path / "thing"
    fill(target, "first")
    target.rename(tmp_path / ".thing.replaced")
    (tmp_path / ".thing.partial").mkdir()
    with pytest.raises(RuntimeError), whole_folder(target, marker="marker"):
        raise RuntimeError
    assert (target / "marker").read_text() == "first"
    fill(target, "second")
    assert (target / "marker").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


def test_a_rename_that_fails_gives_the_earlier_folder_back(tmp_path, monkeypatch):
    target = tmp_path / "thing"
    fill(target, "first")
    rename = Path.rename

    def refuse_the_last(path, to):
        if path.name.endswith(".partial"):
            raise OSError("no more names")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", refuse_the_last)
    with pytest.raises(OSError, match="no more names"):
        fill(target, "second")
    assert (target / "marker").read_text() == "first"


def test_a_folder_of_another_kind_is_never_replaced(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/love.txt").write_text("dear")
    with pytest.raises(DataError, match="holds something else"):
        fill(tmp_path / "letters", "x")
    assert (tmp_path / "letters/love.txt").read_text() == "dear"


def test_json_lines_lose_only_a_torn_end(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"b": ')
    assert read_json_lines(path) == [{"a": 1}]
    path.write_text('{"a": 1}\n[]\n{"b": 2}\n')
    with pytest.raises(DataError, match=r"line 2: '\[\]' is no JSON object"):
        read_json_lines(path)
