"""Recipe files: settings in YAML that override those of the parent named by `extends:`.

    # recipes/mine.yaml: the base recipe with smaller batches
    extends: st_moe_base_pretrain.yaml
    training:
      batch_size: 512

The parent's path is relative to the file, or it is the name of one of ours (`extends:
st_moe_base_pretrain`); it may have its own parent. Mappings are merged key by key; any other value,
a list too, replaces the parent's.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe.checks import check, shown
from moe.errors import ConfigError, did_you_mean
from moe.parsing import read_yaml
from stmoe import recipes_folder

EXTENDS = "extends"


def find_recipe(name: str) -> Path:
    """Returns the path of a recipe, given as a path or as the name of one of ours without .yaml.

    Raises:
        ConfigError: When it is a bare name, and neither a file nor one of our recipes; or a missing
            file that is called like one of them.
    """
    path = Path(name)
    is_name = path.name == name.strip() and not path.suffix
    names = {file.stem for file in recipes_folder().glob("*.yaml")}
    if not is_name and path.stem in names and not path.exists():
        raise ConfigError(f"There is no file {path}. Did you mean the recipe {path.stem!r}?")
    if not is_name or path.exists():
        return path

    ours = recipes_folder() / f"{name}.yaml"
    if not ours.is_file():
        raise ConfigError(
            f"There is no file and no recipe {name!r}.{did_you_mean(name, names)} stmoe recipes "
            "lists the recipes."
        )
    return ours


def read_recipe_files(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Returns path and nested settings, without `extends`, of a recipe file's parents and itself.

    The most distant parent is first.

    Raises:
        ConfigError: When a file cannot be read, its parent does not exist, or it extends itself,
            directly or through others.
    """
    files: list[tuple[Path, dict[str, Any]]] = []
    chain: list[Path] = []
    next_path: Path | None = path
    while next_path is not None:
        file = next_path
        is_known = any(os.path.realpath(file) == os.path.realpath(child) for child in chain)
        chain.append(file)
        if is_known:
            raise ConfigError(
                f"{path} extends itself: {' -> '.join(map(str, chain))}. Remove `{EXTENDS}` from one of them."
            )
        settings = read_yaml(file)
        next_path = _parent_path(file, settings.pop(EXTENDS)) if EXTENDS in settings else None
        files.append((file, settings))
    return files[::-1]


def merge(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of both; mappings are merged, other values of the child win."""
    merged = dict(parent)
    for key, value in child.items():
        inherited = merged.get(key)
        if isinstance(inherited, Mapping) and isinstance(value, Mapping):
            value = merge(inherited, value)
        merged[key] = value
    return merged


def _parent_path(path: Path, parent: Any) -> Path:
    """Returns the path of the file that `path` extends.

    Raises:
        ConfigError: When `parent` is not the path of a file.
    """
    is_path = isinstance(parent, str) and bool(parent.strip())
    expected = "the path of one recipe file, relative to this one"
    check(is_path, f"{path}: {EXTENDS}", parent, expected)
    # Resolve `..`, so that messages show a path that the user recognizes.
    parent_path = Path(os.path.normpath(path.parent / parent))
    ours = recipes_folder() / f"{parent}.yaml"
    if not parent_path.exists() and Path(parent).name == parent and ours.is_file():
        return ours
    if not parent_path.exists():
        raise ConfigError(
            f"{path}: {EXTENDS} is {shown(parent)}, and there is no file {parent_path}. Paths are relative to the "
            "file that names them; stmoe recipes lists the names."
        )
    return parent_path
