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
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from moe.checks import shown
from moe.errors import ConfigError, did_you_mean
from moe.parsing import UniqueKeyLoader, read_text, read_yaml
from stmoe import recipes_folder

EXTENDS = "extends"


class RecipeFile(NamedTuple):
    """One recipe file, without the settings it inherits.

    Attributes:
        path: The file.
        settings: Its nested settings, without `extends`.
        node: The same as YAML nodes, which preserve how a value is written: some readers distinguish
            `1e-3` from `"1e-3"`.
    """

    path: Path
    settings: dict[str, Any]
    node: yaml.MappingNode


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


def read_recipe_files(path: Path) -> list[RecipeFile]:
    """Returns a recipe file and its parents, the most distant one last.

    Raises:
        ConfigError: When a file cannot be read, its parent does not exist, or it extends itself,
            directly or through others.
    """
    # From child to parent, until a file has none; `chain` is for the error message.
    files: list[RecipeFile] = []
    chain: list[Path] = []
    next_path: Path | None = path
    while next_path is not None:
        chain.append(next_path)
        if any(os.path.realpath(next_path) == os.path.realpath(file.path) for file in files):
            raise ConfigError(
                f"{path} extends itself: {' -> '.join(map(str, chain))}. Remove `{EXTENDS}` from one of them."
            )
        file, next_path = _read_file(next_path)
        files.append(file)
    return files


def merged_text(files: list[RecipeFile]) -> str:
    """Returns the settings of a chain of files as one YAML text; the first file's settings win.

    Args:
        files: Result of `read_recipe_files`.
    """
    # From the most distant parent to the file itself, each overrides the previous one.
    node = files[-1].node
    for file in reversed(files[:-1]):
        node = _merge(node, file.node)
    return yaml.serialize(node, Dumper=yaml.SafeDumper, allow_unicode=True)


def _read_file(path: Path) -> tuple[RecipeFile, Path | None]:
    """Returns a recipe file, and the path of its parent, if it names one."""
    settings = read_yaml(path)
    node = yaml.compose(read_text(path), Loader=UniqueKeyLoader)
    assert isinstance(node, yaml.MappingNode), "read_yaml refuses all but mappings"

    parent = None
    if EXTENDS in settings:
        parent = _parent_path(path, settings.pop(EXTENDS))

    # The nodes without `extends`.
    entries = [entry for entry in node.value if entry[0].value != EXTENDS]
    return RecipeFile(path, settings, yaml.MappingNode(node.tag, entries)), parent


def _parent_path(path: Path, parent: Any) -> Path:
    """Returns the path of the file that `path` extends.

    Raises:
        ConfigError: When `parent` is not the path of a file.
    """
    if not isinstance(parent, str) or not parent.strip():
        raise ConfigError(
            f"{path}: {EXTENDS} is {shown(parent)}; expected the path of one recipe file, relative to this one."
        )
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


def _merge(parent: yaml.MappingNode, child: yaml.MappingNode) -> yaml.MappingNode:
    """Returns the settings of both; mappings are merged, other values of the child win."""
    entries = {key.value: (key, value) for key, value in parent.value}
    for key, value in child.value:
        _, inherited = entries.get(key.value, (key, None))
        if isinstance(inherited, yaml.MappingNode) and isinstance(value, yaml.MappingNode):
            value = _merge(inherited, value)
        entries[key.value] = (key, value)
    return yaml.MappingNode(child.tag, list(entries.values()))
