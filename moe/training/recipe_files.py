"""Recipe files: settings in YAML, on top of those of the parent that a file names with `extends:`.

    # recipes/mine.yaml: the base recipe with smaller batches
    extends: st_moe_base_pretrain.yaml
    training:
      batch_size: 512

The parent's path is relative to the file, and the parent may have a parent of its own. Mappings are
merged key by key; any other value, a list too, replaces that of the parent.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from moe.checks import shown
from moe.errors import ConfigError
from moe.parsing import PlainLoader, read_text, read_yaml

EXTENDS = "extends"

RENAMED_SETTINGS = {"optimizer_slots": "optimizer_state"}
"""Present name of each setting that was renamed; the old one is read, with a warning, for one release."""


class RecipeFile(NamedTuple):
    """One recipe file, without what it inherits.

    Attributes:
        path: The file.
        settings: Its nested settings, without `extends`.
        node: The same as YAML nodes, which keep how each value is written: `1e-3` and `"1e-3"`
            are not the same to every reader.
    """

    path: Path
    settings: dict[str, Any]
    node: yaml.MappingNode


def read_recipe_files(path: Path) -> list[RecipeFile]:
    """Returns a recipe file and those that it extends: the file first, its farthest parent last.

    Raises:
        ConfigError: When a file cannot be read, names no file as its parent, or extends itself,
            directly or by others; the files on the way are named.
    """
    # From child to parent, until a file has none; `chain` is what an error shows.
    files: list[RecipeFile] = []
    chain: list[Path] = []
    next_path: Path | None = path
    while next_path is not None:
        chain.append(next_path)
        if any(_is_same_path(next_path, earlier.path) for earlier in files):
            raise ConfigError(
                f"{path} extends itself: {' -> '.join(map(str, chain))}. Remove `{EXTENDS}` from one of them."
            )
        file, next_path = _read_file(next_path)
        files.append(file)
    return files


def merged_text(files: list[RecipeFile]) -> str:
    """Returns the settings of a chain of files as one YAML text; those of the first file win.

    Args:
        files: What `read_recipe_files` returned.
    """
    # From the farthest parent to the file itself, each on top of the one before.
    node = files[-1].node
    for file in reversed(files[:-1]):
        node = _merge(node, file.node)
    return yaml.serialize(node, Dumper=yaml.SafeDumper, allow_unicode=True)


def rename_settings(
    settings: Mapping[str, Any], warn: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Returns settings under their present names.

    Args:
        settings: Settings by name, some of which may have the name of an earlier version.
        warn: Called with a sentence about each old name; None for settings
            that no user has typed, as those of a checkpoint.

    Raises:
        ConfigError: When a setting is given by both of its names.
    """
    renamed: dict[str, Any] = {}
    for name, value in settings.items():
        new_name = RENAMED_SETTINGS.get(name, name)
        if new_name in renamed:
            raise ConfigError(f"{name} and {new_name} are one setting. Keep {new_name} alone.")
        if new_name != name and warn is not None:
            warn(f"{name} is now called {new_name}; the old name will go with the next release.")
        renamed[new_name] = value
    return renamed


def _read_file(path: Path) -> tuple[RecipeFile, Path | None]:
    """Returns a recipe file, and the path of its parent, if it names one."""
    settings = read_yaml(path)
    node = yaml.compose(read_text(path), Loader=PlainLoader)
    assert isinstance(node, yaml.MappingNode), "read_yaml refuses all but mappings"

    parent = None
    if EXTENDS in settings:
        parent = _parent_path(path, settings.pop(EXTENDS))

    def warn(text: str) -> None:
        warnings.warn(f"{path}: {text}", FutureWarning, stacklevel=2)

    settings = rename_settings(settings, warn)

    # The nodes without `extends`, under the same names as the settings.
    entries = []
    for key, value in node.value:
        if key.value != EXTENDS:
            name = RENAMED_SETTINGS.get(key.value, key.value)
            entries.append((yaml.ScalarNode(key.tag, name, style=key.style), value))
    return RecipeFile(path, settings, yaml.MappingNode(node.tag, entries)), parent


def _parent_path(path: Path, parent: Any) -> Path:
    """Returns the path of the file that `path` extends.

    Raises:
        ConfigError: When `parent` is no path of a file.
    """
    if not isinstance(parent, str) or not parent.strip() or "\0" in parent:
        raise ConfigError(
            f"{path}: {EXTENDS} is {shown(parent)}; expected the path of one recipe file, relative to this one."
        )
    # `..` is taken out of the path, so that messages show the file as the user knows it.
    parent_path = Path(os.path.normpath(path.parent / parent))
    if not parent_path.exists():
        raise ConfigError(
            f"{path}: {EXTENDS} is {shown(parent)}, and there is no file {parent_path}. Paths are relative to the file "
            "that names them."
        )
    return parent_path


def _merge(parent: yaml.MappingNode, child: yaml.MappingNode) -> yaml.MappingNode:
    """Returns the settings of both; where both have one, mappings are merged, else the child's wins."""
    entries = {key.value: (key, value) for key, value in parent.value}
    for key, value in child.value:
        _, inherited = entries.get(key.value, (key, None))
        if isinstance(inherited, yaml.MappingNode) and isinstance(value, yaml.MappingNode):
            value = _merge(inherited, value)
        entries[key.value] = (key, value)
    return yaml.MappingNode(child.tag, list(entries.values()))


def _is_same_path(a: Path, b: Path) -> bool:
    return os.path.realpath(a) == os.path.realpath(b)
