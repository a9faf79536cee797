"""Text of files to values: whatever cannot be used is one error that names the place."""

import os
import threading
import zipfile
from typing import Annotated, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from moe import CheckpointError, ConfigError, DataError
from moe.data.pair_files import Pair, read_pairs
from moe.parsing import (
    parse_json,
    read_json,
    read_json_lines,
    read_text,
    read_yaml,
    reading,
    to_record,
    write_yaml,
)


class State(NamedTuple):
    step: Annotated[int, Field(ge=0)]
    name: str
    sizes: dict[str, int] | None = None


def test_what_is_no_json_is_one_error():
    texts = ["", '"\\ud800"', "1" * 5_000, "[" * 100_000 + "]" * 100_000, "\ud800", "{'a': 1}"]
    for text in texts:
        with pytest.raises(DataError, match=r"^here, line 7: .* is not JSON .*Do this\.$"):
            parse_json(text, where="here, line 7", advice="Do this.")


@settings(max_examples=30)
@given(st.binary(max_size=40))
def test_any_bytes_are_a_value_or_one_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "x.json"
    path.write_bytes(content)
    for read in (read_json, read_yaml, lambda path: list(read_json_lines(path))):
        try:
            read(path)
        except (DataError, ConfigError) as error:
            assert str(path) in str(error)


def test_a_missing_file_says_what_to_do(tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.json cannot be read: .*Copy it again\."):
        read_json(tmp_path / "none.json", advice="Copy it again.", error=CheckpointError)
    with pytest.raises(DataError, match="Is a directory"):
        read_text(tmp_path)


def test_whatever_a_library_raises_names_the_file():
    panic = type("PanicException", (BaseException,), {})
    failures = (zipfile.BadZipFile("no\nzip"), KeyError("x"), RecursionError(), panic("no regex"))
    for failure in failures:
        with (
            pytest.raises(
                CheckpointError, match=r"^a\.npz cannot be read as routes: .+ Restore it\.$"
            ),
            reading(
                "a.npz",
                problem="cannot be read as routes",
                advice="Restore it.",
                error=CheckpointError,
            ),
        ):
            raise failure
    for failure in (KeyboardInterrupt(), ConfigError("x is 1.")):
        with pytest.raises(type(failure)), reading("a.npz", advice="Restore it."):
            raise failure


def test_json_lines_lose_only_a_torn_end_and_only_where_that_may_be(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n{"b": ')
    assert list(read_json_lines(path, torn_end=True)) == [(1, {"a": 1})]
    with pytest.raises(DataError, match="line 3"):
        list(read_json_lines(path))
    path.write_text('{"a": 1}\n[]\n{"b": 2}\n')
    with pytest.raises(DataError, match=r"line 2: '\[\]' is not a JSON object"):
        list(read_json_lines(path, torn_end=True))


def test_a_text_may_hold_other_line_separators(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "x\u2028y"}\r\n{"a": "z"}\n', encoding="utf-8")
    assert [value["a"] for _, value in read_json_lines(path)] == ["x\u2028y", "z"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"step": "3", "name": "x"}, "step is '3'"),
        ({"step": True, "name": "x"}, "step is True"),
        ({"step": -1, "name": "x"}, "step is -1: Input should be greater than or equal to 0"),
        ({"step": 1}, "name is missing"),
        ({"step": 1, "name": "x", "sizes": {"a": "b"}}, "sizes.*a is 'b'"),
        ({"step": 1, "name": "x", "nmae": "y"}, "nmae is 'y'"),
        ([], r"its content is \[\]"),
    ],
)
def test_a_record_of_another_shape_names_the_field(value, message):
    with pytest.raises(DataError, match=f"^state.json: {message}"):
        to_record(State, value, where="state.json")


def test_a_record_is_typed():
    values = {"step": 3, "name": "x", "sizes": {"a": 1}}
    assert to_record(State, values, where="") == State(3, "x", {"a": 1})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "'a' is given twice"),
        ("a: {b: 1, b: 2}", "'b' is given twice"),
        ("[" * 20_000, "recursion depth"),
        ("a: " + "1" * 5_000, "is not YAML"),
        ("- a", r"holds \['a'\]"),
        ("", "holds None"),
        ("a: !!python/object/apply:os.getcwd []", "os.getcwd"),
        ("a: !!bool x", "is not YAML"),
        ("a: 0b_", "is not YAML"),
    ],
)
def test_yaml_that_cannot_be_meant_is_refused(tmp_path, text, message):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_yaml(tmp_path / "a.yaml")


def test_data_that_the_user_names_may_come_from_a_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    text = '{"inputs": "two", "targets": "three"}\n'
    writer = threading.Thread(target=path.write_text, args=(text,))
    writer.start()
    assert read_pairs(path) == [Pair("two", "three")]
    writer.join()


def test_a_number_with_an_exponent_is_one_in_yaml_and_what_looks_like_it_stays_a_text(tmp_path):
    for text, value in (
        ("1e-3", 1e-3),
        ("-2.E4", -2e4),
        (".5e1", 5.0),
        ("~x", "~x"),
        ("0o17", "0o17"),
    ):
        (tmp_path / "a.yaml").write_text(f"a: {text}")
        assert read_yaml(tmp_path / "a.yaml") == {"a": value}
    (tmp_path / "a.yaml").write_text(write_yaml({"a": "1e-3", "b": 1e-3}))
    assert read_yaml(tmp_path / "a.yaml") == {"a": "1e-3", "b": 1e-3}
    (tmp_path / "a.yaml").write_text("a: &x [1]\nb: *x")
    assert read_yaml(tmp_path / "a.yaml") == {"a": [1], "b": [1]}
