"""Files of JSON lines that grow: kills, full disks, links, and settings that have changed."""

import datetime
import resource

import pytest

from moe.errors import ConfigError
from moe.json_lines import JsonLines, check_settings
from moe.parsing import read_json_lines


def lines_of(path):
    return [line for _, line in read_json_lines(path)]


def test_a_file_killed_anywhere_keeps_its_whole_lines_and_grows(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = JsonLines(path)
    lines.append({"n": 1, "text": "ä"}, {"n": 2, "day": datetime.date(2026, 1, 2)})
    lines.append({"n": 3.5})
    whole = path.read_bytes()
    expected = [{"n": 1, "text": "ä"}, {"n": 2, "day": "2026-01-02"}, {"n": 3.5}]
    assert lines_of(path) == expected

    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        num_lines = whole[:size].count(b"\n")
        JsonLines(path).append({"last": True})
        assert lines_of(path) == [*expected[:num_lines], {"last": True}]


def test_given_lines_replace_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    JsonLines(path).append({"n": 1}, {"n": 2})
    JsonLines(path, [{"n": 2}]).append({"n": 7})
    assert lines_of(path) == [{"n": 2}, {"n": 7}]


def test_a_full_disk_is_one_error_with_the_name_of_the_file_and_no_half_of_a_line(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = JsonLines(path)
    lines.append({"text": "x" * 1000})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 7, hard))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            lines.append({"n": 1}, {"text": "y" * 1000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.filename == str(path)
    lines.append({"n": 2})
    assert lines_of(path) == [{"text": "x" * 1000}, {"n": 2}]


def test_a_file_behind_a_link_is_never_changed(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("half a line")
    path = tmp_path / "a.jsonl"
    path.symlink_to(mine)
    with pytest.raises(OSError, match="it is a link"):
        JsonLines(path)
    JsonLines(path, [{"n": 1}])
    assert mine.read_text() == "half a line" and lines_of(path) == [{"n": 1}]


def test_other_settings_are_refused_by_name_with_both_values(tmp_path):
    check_settings(tmp_path, {"seed": 0, "more": 1}, {"seed": 0})
    for saved in ({"seed": 0}, {}):
        with pytest.raises(ConfigError, match=r"seed (0|None), not 5"):
            check_settings(tmp_path, saved, {"seed": 5})
