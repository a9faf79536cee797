"""Texts to trace: the user's files, or held-out text of a corpus.

Comes before `examples`, which builds batches from them.
"""

from collections.abc import Sequence
from pathlib import Path

from moe.data.corpus import load_corpus
from moe.data.documents import Document, read_files
from moe.tracing.examples import SourceText


def file_texts(items: Sequence[str]) -> list[SourceText]:
    """Returns the documents of files.

    Args:
        items: Files or folders, or NAME=FILE for each kind of text; see `read_files`.

    Raises:
        DataError: When a file is missing or no text.
    """
    documents: list[tuple[Document, str]] = []
    for item in items:
        name, separator, file = item.partition("=")
        domain = name if separator else Path(item).stem
        for document in read_files([file if separator else item]):
            documents.append((document, domain))

    texts = []
    for number, (document, domain) in enumerate(documents):
        texts.append(SourceText(document.text, "", number, domain))
    return texts


def corpus_texts(folder: Path) -> list[SourceText]:
    """Returns the held-out documents of a folder made by stmoe corpus; a package is a domain.

    Raises:
        DataError: When there is no corpus, or it is damaged.
    """
    held_out = load_corpus(folder).held_out
    rows = zip(held_out["text"], held_out["package"], strict=True)
    return [SourceText(text, "", number, domain) for number, (text, domain) in enumerate(rows)]
