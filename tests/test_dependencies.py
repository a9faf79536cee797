"""Every import is of a declared distribution: of the core for the wheel, of any extra elsewhere."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
OURS = {"moe", "stmoe", "stmoe_eval", "benchmarks", "scripts"}
NOT_INSTALLED = {"torchft": "torchft", "st_moe_pytorch": "st-moe-pytorch"}
"""Modules of extras that `make` does not install, and their distributions."""

OPTIONAL = {"babel", "peft", "rouge_score", "torchft"}
OPTIONAL |= {"ctranslate2", "onnxruntime", "onnxscript", "starlette", "uvicorn"}
"""Modules of extras that the wheel imports, in functions, where the user asks for what needs them."""

PART_OF = {"pydantic_core": "pydantic"}
"""Distributions whose versions another one, which is declared, pins exactly."""


def normalized(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(requirements):
    return {normalized(Requirement(text).name) for text in requirements}


def imported_modules(folder):
    """Returns the top-level modules that the files of a folder import, each with a file."""
    modules = {}
    paths = [ROOT / "stmoe.py"] if folder == "stmoe" else sorted((ROOT / folder).rglob("*.py"))
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                modules.setdefault(name.split(".")[0], path.relative_to(ROOT))
    return {name: path for name, path in modules.items() if name not in sys.stdlib_module_names}


@pytest.mark.parametrize("folder", ["moe", "stmoe", "eval", "benchmarks", "scripts"])
def test_every_import_is_of_a_declared_distribution(folder):
    core = distributions(PROJECT["dependencies"])
    extras = set().union(*map(distributions, EXTRAS.values()))
    installed = packages_distributions()
    undeclared = []
    for module, path in imported_modules(folder).items():
        names = [PART_OF.get(module, NOT_INSTALLED.get(module, module))]
        if module in installed and module not in PART_OF:
            names = installed[module]
        in_wheel = folder in ("moe", "stmoe") and module not in OPTIONAL
        declared = core if in_wheel else core | extras
        if module not in OURS and not declared & set(map(normalized, names)):
            undeclared.append(f"{path} imports {module}")
    assert undeclared == []


def test_every_optional_module_is_imported():
    assert imported_modules("moe").keys() >= OPTIONAL
