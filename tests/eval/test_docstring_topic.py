"""Promises of docstring -> topic; a standard library written by hand is the oracle of what is a row."""

import pytest

from eval.corpora.packages import read_packages
from eval.task import SPLITS, TASKS
from eval.task_readers import unseen_task
from eval.tasks import docstring_topic

TASK = TASKS.get("docstring_topic")
LOCKS = "Wake up the task that waits for the lock."


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A function that writes docstrings by file name and returns the rows by split."""
    monkeypatch.setattr(docstring_topic, "package_folder", lambda package: tmp_path)

    def rows(files):
        for name, texts in files.items():
            definitions = [f"def f{number}():\n    {text!r}\n" for number, text in enumerate(texts)]
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text('# files without """ are not parsed\n' + "".join(definitions))
        return (
            docstring_topic._all_rows.__wrapped__.__wrapped__()
        )  # neither kept in memory nor on disk

    return rows


def places(rows):
    """The split and topic of each file."""
    return {row["file"]: (split, row["topic"]) for split in SPLITS for row in rows[split]}


def test_there_are_enough_examples_of_20_to_40_topics():
    assert 20 <= len(TASK.choices) <= 40
    assert len(TASK.examples("train")) >= 3_000
    assert len(TASK.examples("test")) >= 800


def test_a_module_has_its_own_place_or_that_of_its_package_and_unknown_ones_none(library):
    rows = library(
        {
            "asyncio/events.py": ["Run the callback as soon as possible."],
            "asyncio/locks.py": [LOCKS],
            "asyncio/timeouts.py": ["Cancel the task when its time is over."],
            "logging/__init__.py": ["Write what has happened to a stream."],
            "logging/config.py": ["Read the handlers from a mapping."],
            "logginghouse.py": ["A module that nobody has heard of before."],
        }
    )
    assert places(rows) == {
        "stdlib/asyncio/events.py": ("train", "asynchronous programming"),
        "stdlib/asyncio/locks.py": ("test", "asynchronous programming"),
        "stdlib/asyncio/timeouts.py": ("validation", "asynchronous programming"),
        "stdlib/logging/__init__.py": ("train", "logging"),
        "stdlib/logging/config.py": ("test", "logging"),
    }


def test_a_package_that_was_one_file_in_an_earlier_python_keeps_its_place(library):
    rows = library({"zipfile/_path/glob.py": ["Match the names of members of the archive."]})
    assert places(rows) == {"stdlib/zipfile/_path/glob.py": ("test", "archives and compression")}


def test_the_words_of_the_modules_name_are_not_in_the_text(library):
    text = "The asyncio.queues module: Queues of _queues wake a queue in asyncio_tests up."
    files = {"asyncio/queues.py": [text], "_pydecimal.py": ["Pydecimal is exact here, too."]}
    rows = library(files)
    (row,) = rows["test"]
    assert row["text"] == "The . module: of wake a queue in asyncio_tests up."
    (row,) = rows["train"]
    assert row["text"] == "is exact here, too."


def test_of_long_texts_the_first_words_stay_and_short_ones_have_no_row(library):
    long = " ".join(f"word{chr(97 + i % 26)}" for i in range(100)) + "."
    rows = library({"asyncio/locks.py": [long, "Two words.", ">>> print(1)\n1"]})
    (row,) = rows["test"]
    assert row["text"].split() == long.split()[: docstring_topic.MAX_WORDS]


def test_equal_texts_stay_in_the_test_split(library):
    rows = library(
        {
            "asyncio/events.py": [LOCKS.upper()],
            "asyncio/locks.py": [LOCKS, LOCKS],
            "asyncio/timeouts.py": [LOCKS.replace(" ", "  ")],
        }
    )
    assert [row["file"] for split in SPLITS for row in rows[split]] == ["stdlib/asyncio/locks.py"]


def test_no_module_has_two_places():
    modules = []
    for topic in docstring_topic.TOPICS.values():
        for names in topic:
            modules += names.split()
    assert sorted(set(modules)) == sorted(modules)


@pytest.mark.slow
def test_every_tested_file_is_a_document_that_a_corpus_can_leave_out():
    sources = {document.source for document in read_packages(["stdlib"])}
    files = unseen_task("docstring_topic").sources
    assert len(files) > 50
    assert files <= sources
