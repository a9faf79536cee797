"""Promises of message -> exception; packages written by hand are the oracle of what is a row."""

import pytest

from eval.task import SPLITS, TASKS
from eval.tasks import raised_exception

TASK = TASKS.get("raised_exception")


@pytest.fixture
def rows_of(tmp_path, monkeypatch):
    """A function that takes the source of one package and returns pairs of message and class."""
    monkeypatch.setattr(raised_exception, "PACKAGES", ("stdlib",))
    monkeypatch.setattr(raised_exception, "package_folder", lambda package: tmp_path)

    def rows(source):
        (tmp_path / "module.py").write_text(source)
        splits = (
            raised_exception._all_rows.__wrapped__.__wrapped__()
        )  # neither kept in memory nor on disk
        return {(row["message"], row["exception"]) for split in SPLITS for row in splits[split]}

    return rows


def test_there_are_enough_examples_of_12_classes_and_no_file_is_in_two_splits():
    assert len(TASK.choices) == 12
    assert len(TASK.examples("train")) >= 2_000
    assert len(TASK.examples("test")) >= 500
    files = [{example.fields["file"] for example in TASK.examples(split)} for split in SPLITS]
    assert files[0].isdisjoint(files[1] | files[2])
    assert files[1].isdisjoint(files[2])


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("'the key is missing here'", "the key is missing here"),
        ("f'got {value!r} instead of {other}'", "got _ instead of _"),
        ("'got %s instead of %d' % (a, b)", "got %s instead of %d"),
        ("'no such file: ' + name", "no such file: _"),
        ("'in all {} rows'.format(n)", "in all {} rows"),
        ("'a KeyError for\\n  a caller'", "a _ for a caller"),
    ],
)
def test_a_message_keeps_its_words_but_neither_its_values_nor_its_class(
    rows_of, expression, message
):
    assert rows_of(f"raise KeyError({expression})") == {(message, "KeyError")}


def test_statements_without_a_known_class_or_a_message_in_words_have_no_row(rows_of):
    assert not rows_of(
        "raise\nraise KeyError\nraise KeyError()\nraise KeyError('two words')\n"
        "raise KeyError(name)\nraise MyError('a message of four words')\n"
    )


def test_equal_messages_occur_once_and_a_class_is_known_by_its_last_name(rows_of):
    source = (
        "raise linalg.LinAlgError('it cannot be inverted')\nraise OSError('It cannot be inverted.')"
    )
    assert rows_of(source) == {("it cannot be inverted", "LinAlgError")}


def test_a_file_that_python_cannot_parse_is_left_out_with_a_warning(rows_of, caplog):
    assert not rows_of("raise KeyError('a message of words'")
    assert "module.py is left out" in caplog.text
