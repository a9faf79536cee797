"""Documents of the user. Oracle: files written by the test."""

import pytest

from moe.data.documents import OWN_LICENCE, Document, read_files
from moe.errors import DataError


def test_a_text_file_is_one_document_with_blank_lines_between_paragraphs(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"\xef\xbb\xbfOne  line\r\nand the next.\r\n \t\r\n\r\n\r\nNew paragraph.\r\n")
    assert read_files([path]) == [
        Document("One line and the next.\n\nNew paragraph.", "book.txt", "book", OWN_LICENCE)
    ]


def test_a_folder_stands_for_its_files_and_says_what_it_leaves_out(tmp_path, caplog):
    folder = tmp_path / "mine"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.md").write_text("Second.", encoding="utf-8")
    (folder / "a.jsonl").write_text(
        '{"text": "First."}\n\n{"text": " "}\n{"text": "Third.", "id": 3}\n', encoding="utf-8"
    )
    (folder / "deep" / "c.txt").write_text("Fourth.", encoding="utf-8")
    (folder / "image.png").write_bytes(b"\x89PNG")
    assert {document.source: document.text for document in read_files([folder])} == {
        "mine/a.jsonl:1": "First.",
        "mine/a.jsonl:4": "Third.",
        "mine/b.md": "Second.",
        "mine/deep/c.txt": "Fourth.",
    }
    assert "1 files ending in .png are left out" in caplog.text


def test_a_file_that_is_not_utf8_says_at_which_byte_and_line(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("first line\nna\u00efve\n".encode("latin1"))
    with pytest.raises(DataError, match=r"latin\.txt .* byte 0xef at offset 13 \(line 2\)"):
        read_files([path])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x", "id": 1}', "line 2: text is missing"),
        ('{"text": 5}', "line 2: text is 5"),
        ("{'text': 1}", "line 2: .* is not JSON"),
    ],
)
def test_a_jsonl_line_without_text_is_named(tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_files([path])


def test_no_text_at_all_is_an_error(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n\n ", encoding="utf-8")
    with pytest.raises(DataError, match=r"There is no text in .*empty\.txt"):
        read_files([tmp_path / "empty.txt"])
    with pytest.raises(DataError, match="There is no text in an empty list of paths"):
        read_files([])


def test_a_path_that_is_missing_or_of_another_kind_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.txt does not exist"):
        read_files([tmp_path / "nothing.txt"])
    (tmp_path / "paper.pdf").write_bytes(b"%PDF")
    with pytest.raises(DataError, match=r"ends in '\.pdf'; expected one of \.txt, \.md"):
        read_files([tmp_path / "paper.pdf"])
