"""Real English to test on: docstrings of this Python, and a vocabulary trained on some of them."""

from pathlib import Path

import pytest

from moe.data.docstrings import docstrings, package_folder, python_files
from moe.data.prose import prose_paragraphs
from moe.data.tokenizer import train_tokenizer

VOCAB_SIZE = 607


@pytest.fixture(scope="session")
def raw_docstrings() -> list[str]:
    """Docstrings as they are, with code, rules and tables: what is hardest for a tokenizer."""
    return [
        docstring
        for path in python_files(package_folder("stdlib") / "email")
        for docstring in docstrings(path)
    ]


@pytest.fixture(scope="session")
def english(raw_docstrings: list[str]) -> list[str]:
    return [
        text for docstring in raw_docstrings if (text := "\n\n".join(prose_paragraphs(docstring)))
    ]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory, english: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary") / "tokenizer"
    train_tokenizer(english, VOCAB_SIZE, folder)
    return folder
