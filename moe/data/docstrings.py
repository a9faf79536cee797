"""English text from docstrings of installed packages; reads their source files and never runs them.

Comes after `prose` and `documents`, before `corpus`.
"""

import ast
import gc
import importlib.util
import logging
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from moe.data.documents import Document
from moe.data.prose import prose_paragraphs
from moe.errors import DataError
from moe.parsing import printable

logger = logging.getLogger(__name__)

# Test code is repetitive and explains little; site-packages is inside the standard library's
# folder.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "_internal", "lib2to3", "__pycache__"}
)

PACKAGE_LICENCES = {"stdlib": "PSF-2.0", "torch": "BSD-3-Clause", "numpy": "BSD-3-Clause"}
"""The packages of `read_python_corpus`."""


class Package(NamedTuple):
    """A folder of Python sources.

    Attributes:
        name: Prefix of the documents' sources.
        folder: Folder of the files.
        licence: License stated by its metadata.
    """

    name: str
    folder: Path
    licence: str


def read_python_corpus() -> list[Document]:
    """Returns the English prose of this Python installation: about 7 million characters.

    There is a document for each source file of the standard library, torch and numpy (its
    docstrings) and one for each topic of the Python language reference. The amount differs a little
    between versions of Python and torch.

    Raises:
        DataError: When torch or numpy is not installed as source files.
    """
    with garbage_collector_paused():
        documents = topic_documents()
        for name, licence in PACKAGE_LICENCES.items():
            documents += docstring_documents(Package(name, package_folder(name), licence))
    return documents


@contextmanager
def garbage_collector_paused() -> Iterator[None]:
    """Keeps the cycle collector off: syntax trees hold no cycles, and the search doubles the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def topic_documents() -> list[Document]:
    """Returns the language reference that `help("topic")` shows, a document for each topic."""
    documents = []
    for topic, page in sorted(language_topics().items()):
        text = "\n\n".join(prose_paragraphs(page))
        if text:
            source = f"pydoc_data/topics.py#{topic}"
            documents.append(Document(text, source, "stdlib", PACKAGE_LICENCES["stdlib"]))
    return documents


def docstring_documents(package: Package) -> Iterator[Document]:
    """Yields the docstrings of a package, one document per source file that has docstrings."""
    for path in python_files(package.folder):
        paragraphs = []
        for docstring in docstrings(path):
            paragraphs += prose_paragraphs(docstring)
        if paragraphs:
            yield file_document(package, path, paragraphs)


def file_document(package: Package, path: Path, paragraphs: list[str]) -> Document:
    """Returns the document of a file of a package."""
    source = f"{package.name}/{path.relative_to(package.folder).as_posix()}"
    return Document("\n\n".join(paragraphs), printable(source), package.name, package.licence)


def package_folder(package: str) -> Path:
    """Returns the source folder of a package without importing it.

    Args:
        package: Name of the package; "stdlib" for the standard library.

    Raises:
        DataError: When the package is not installed as a folder of source files.
    """
    if package == "stdlib":
        return Path(sysconfig.get_path("stdlib"))

    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"The package {package!r} is not installed as a folder of source files. "
            "Install it, or leave it out."
        )
    return Path(spec.submodule_search_locations[0])


def python_files(folder: Path) -> list[Path]:
    """Returns the .py files below `folder`, sorted by relative path, without test code."""
    files = []
    for path in folder.rglob("*.py"):
        is_skipped = not SKIPPED_FOLDERS.isdisjoint(path.relative_to(folder).parts)
        if not is_skipped and path.is_file():
            files.append(path)
    return sorted(files)


def docstrings(path: Path) -> list[str]:
    """Returns the docstrings of one source file in reading order, dedented; see `parse_file`."""
    # Parsing takes 95 % of the time, and a file without triple quotes has no prose.
    source = path.read_bytes()
    if b'"""' not in source and b"'''" not in source:
        return []
    tree = parse_source(source, path)
    return [] if tree is None else list(_walk_docstrings(tree))


def parse_source(source: bytes, path: Path) -> ast.Module | None:
    """Returns the syntax tree of a source file.

    A file that this Python cannot parse causes a warning and gives None: packages ship files for
    other versions.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's code
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            logger.warning("%s is left out: this Python cannot parse it (%s).", path, error)
            return None


def _walk_docstrings(node: ast.AST) -> Iterator[str]:
    """Yields the docstrings of a module, class or function and of everything defined inside it."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        docstring = ast.get_docstring(node)
        if docstring:
            yield docstring

    # Statements only: expressions define no names.
    for block in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(node, block, ()):
            if isinstance(child, ast.stmt | ast.excepthandler):
                yield from _walk_docstrings(child)


def language_topics() -> dict[str, str]:
    """Returns the language reference that `help("topic")` shows, by topic.

    It is empty if Python does not include it.
    """
    path = package_folder("stdlib") / "pydoc_data" / "topics.py"
    if not path.is_file():
        return {}
    for statement in ast.parse(path.read_bytes()).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            return ast.literal_eval(statement.value)
    return {}
