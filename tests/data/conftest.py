"""Real English to test on: docstrings of this Python, and a vocabulary trained on some of them."""

import ast
import email
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from moe.data.tokenizer import load_tokenizer, train_tokenizer

VOCAB_SIZE = 607
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def docstrings_of(folder: Path) -> list[str]:
    """Returns the docstrings of each file below a folder, as one text a file."""
    texts = []
    for path in sorted(folder.rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_bytes()))
        docstrings = [ast.get_docstring(node) for node in nodes if isinstance(node, DOCUMENTED)]
        texts.append("\n".join(filter(None, docstrings)))
    return list(filter(None, texts))


@pytest.fixture(scope="session")
def english() -> list[str]:
    """Paragraphs with code, rules and tables among them: what is hardest for a tokenizer."""
    return "\n\n".join(docstrings_of(Path(email.__file__).parent)).split("\n\n")


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory, english: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary") / "tokenizer"
    train_tokenizer(english, VOCAB_SIZE, folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(tokenizer_folder)
