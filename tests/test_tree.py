"""Promises about the tree: small files, every one named in the README, packages without code in
their face.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path for folder in ("moe", "eval", "scripts") for path in (ROOT / folder).rglob("*.py")
)
FORBIDDEN = {"utils.py", "helpers.py", "common.py", "misc.py"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_one_concept(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 600
    assert path.name not in FORBIDDEN


def test_scripts_are_thin():
    for path in (ROOT / "scripts").glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 200, path.name


def test_package_faces_hold_a_docstring_and_nothing_else():
    for path in FILES:
        if path.name == "__init__.py" and path.parent != ROOT / "moe":
            body = ast.parse(path.read_text(encoding="utf-8")).body
            assert len(body) == 1, path
            assert isinstance(body[0], ast.Expr), path


def test_the_readme_names_every_file_of_the_library():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in FILES:
        if path.name not in ("__init__.py", "__main__.py") and path.parent.name != "tasks":
            assert path.name in readme or path.stem in readme, path


def test_public_functions_of_tensors_state_shapes():
    for path in (ROOT / "moe").rglob("*.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        methods = [node for holder in body if _is_public_class(holder) for node in holder.body]
        for node in body + methods:
            if (
                isinstance(node, ast.FunctionDef)
                and node.returns is not None
                and not node.name.startswith("_")
            ):
                docstring = ast.get_docstring(node) or ""
                if ast.unparse(node.returns) == "Tensor":
                    assert "[" in docstring, f"{path.name}: {node.name} states no shape"


def _is_public_class(node):
    return isinstance(node, ast.ClassDef) and not node.name.startswith("_")
