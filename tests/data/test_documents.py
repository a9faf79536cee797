"""Documents of the user. Oracle: files written by the test."""

import pytest

from moe.data.documents import OWN_LICENCE, Document, read_files
from moe.errors import DataError


def test_a_text_file_is_one_document_with_blank_lines_between_paragraphs(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"\xef\xbb\xbfOne  line\r\nand the next.\r\n \t\r\nNew paragraph.\r\n")
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


REFUSED = {
    "data.jsonl": (b'{"text": "fine"}\n{"body": "x"}\n', "line 2: text is missing"),
    "empty.txt": (b" \n\n ", r"There is no text in .*empty\.txt"),
    "paper.pdf": (b"%PDF", r"ends in '\.pdf'; expected one of \.txt, \.md"),
    "latin.txt": (b"first line\nna\xefve\n", r"byte 0xef at offset 13 \(line 2\)"),
    "nothing.txt": (None, "does not exist"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_without_text_is_named(tmp_path, name):
    content, message = REFUSED[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read_files([tmp_path / name])
    assert name in str(error.value)
