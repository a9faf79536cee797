"""Docstrings of installed packages, read from their source files; nothing is imported or run.

Comes before `prose`, which turns a docstring into plain paragraphs.
"""

import ast
import importlib.util
import logging
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from moe.errors import DataError

logger = logging.getLogger(__name__)

# Test code repeats itself and hardly explains anything; site-packages lies inside the standard
# library's folder.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "_internal", "lib2to3", "__pycache__"}
)


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
    """Returns the docstrings of one source file in reading order, dedented.

    A file that this Python cannot parse is named in a warning and gives none: packages ship files
    for other versions.
    """
    # Parsing takes 95 % of the time, and a file without triple quotes has no prose.
    source = path.read_bytes()
    if b'"""' not in source and b"'''" not in source:
        return []

    # Packages ship files for other versions of Python.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's code
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            logger.warning("%s is left out: this Python cannot parse it (%s).", path, error)
            return []
        return list(_walk_docstrings(tree))


def _walk_docstrings(node: ast.AST) -> Iterator[str]:
    """Yields the docstrings of a module, class or function and of what is defined inside it."""
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

    It is empty where Python comes without it.
    """
    path = package_folder("stdlib") / "pydoc_data" / "topics.py"
    if not path.is_file():
        return {}
    for statement in ast.parse(path.read_bytes()).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            return ast.literal_eval(statement.value)
    return {}
