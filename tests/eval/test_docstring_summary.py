"""Promises of docstring body -> summary line; a standard library written by hand is the oracle of
what is a pair.
"""

import pytest

from eval.task import SPLITS, TASKS
from eval.tasks import docstring_summary

TASK = TASKS.get("docstring_summary")
BODY = "The second one holds what the first one has not said yet, in many more words than that."


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A function that writes source files by name and returns their rows by split."""
    monkeypatch.setattr(docstring_summary, "package_folder", lambda package: tmp_path)

    def rows(**docstrings):
        for name, texts in docstrings.items():
            definitions = [f"def f{number}():\n    {text!r}\n" for number, text in enumerate(texts)]
            text = '# files without """ are not parsed\n' + "".join(definitions)
            (tmp_path / f"{name}.py").write_text(text)
        return (
            docstring_summary._all_rows.__wrapped__.__wrapped__()
        )  # neither kept in memory nor on disk

    return rows


def test_no_summary_and_no_body_occurs_twice_in_any_split():
    examples = [example for split in SPLITS for example in TASK.examples(split)]
    for field in ("summary", "body"):
        texts = set()
        for example in examples:
            texts.add("".join(filter(str.isalnum, example.fields[field].casefold())))
        assert len(texts) == len(examples)


def test_what_is_packaged_apart_is_in_training():
    files = {split: {example.group for example in TASK.examples(split)} for split in SPLITS}
    tops = {file.split("/")[1] for split in ("validation", "test") for file in files[split]}
    assert not tops & docstring_summary.PACKAGED_APART
    assert len(files["test"]) > 40


def test_the_prompt_is_t5s_and_the_id_says_where_the_docstring_stands():
    for example in TASK.examples("test"):
        assert example.inputs == f"summarize: {example.fields['body']}"
        assert example.targets == example.fields["summary"]
        assert example.id.startswith(f"{example.group}#")
        assert len(example.fields["body"].split()) > len(example.targets.split())
        assert "\n" not in example.inputs + example.targets


def test_a_pair_is_a_summary_line_a_blank_line_and_a_longer_body(library):
    summary = "Say in one line what the function does."
    no_end = f"A first line that has\nno end in it.\n\n{BODY}"
    rows = library(
        good=[f"{summary}\n\n    {BODY}\n\n    >>> f()\n    3\n    "],
        bad=["Only one line that says it all.", no_end, f"Too few.\n\n{BODY}"],
        short=["A line of six words here.\n\nAnd four words below."],
    )
    (row,) = [row for split in SPLITS for row in rows[split]]
    place = {"id": "stdlib/good.py#1", "file": "stdlib/good.py"}
    assert row == {**place, "body": BODY, "summary": summary}


def test_a_file_that_is_added_moves_no_other(library):
    texts = {}
    for i in range(60):
        texts[f"module{i}"] = [f"Say what number {i} does here.\n\n{i} times. {BODY} {i}"]
    before = library(**texts)
    after = library(another=[f"Say what no other function does.\n\nNever told. {BODY}"])
    for split in SPLITS:
        assert before[split], split
        assert [row for row in after[split] if row["file"] != "stdlib/another.py"] == before[split]


def test_what_is_equal_but_for_case_and_punctuation_occurs_once(library):
    rows = library(
        a=[f"Say what the function does.\n\n{BODY}"],
        b=[f"say what - the function does\n\nAnother body. {BODY}"],
        c=[f"Another summary of the same body.\n\n{BODY.upper()}"],
    )
    assert [row["file"] for split in SPLITS for row in rows[split]] == ["stdlib/a.py"]
