"""Opens the checkpoint of a host, dense or with sparse layers, as weights that are read on demand.

Names are those of the host's class, or of another library, whose format moe.hosts registers.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from moe.checkpoint.loading import empty_model
from moe.convert.weight_map import ConvertedCheckpoint, WeightMapping, are_equal, convert_weights
from moe.models.transformers_private import names_in_model
from moe.models.weight_files import find_weight_files, open_weights


class HostFormat(NamedTuple):
    """How the checkpoints of another library become a host with sparse layers.

    Attributes:
        convert_config: Returns the fields of the host's configuration for the content of a
            config.json and the names of the weights in the index, none if there is no index.
        weight_map: Returns the weights of the host with their names in the library, for the host's
            configuration. Tied weights may be listed under each of their names: the first that is
            stored counts, and others must be copies of it.
    """

    convert_config: Callable[[Mapping[str, Any], Sequence[str]], dict[str, Any]]
    weight_map: Callable[[Any], list[WeightMapping]]


HOST_FORMATS: dict[str, HostFormat] = {}
"""By the `model_type` in config.json, which is in HOST_CLASSES, too; moe.hosts fills it."""


def open_host(
    source: Path | str, model_type: str, config: PreTrainedConfig, **download: Any
) -> ConvertedCheckpoint:
    """Returns a host of a folder or the hub; reads no weight yet.

    Args:
        source: The folder or name.
        model_type: That of its config.json.
        config: Configuration of the host.
        download: `revision`, `token`, `cache_dir` and the like.

    Raises:
        CheckpointError: When there are no weights, or they are incomplete.
    """
    model = empty_model(config)
    stored = open_weights(find_weight_files(source, **download))
    first_names: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names[name] = first_names.setdefault(id(tensor), name)
    weight_map = [WeightMapping(name, (name,)) for name in names]
    if model_type in HOST_FORMATS:
        weight_map = HOST_FORMATS[model_type].weight_map(config)
    else:
        renamed = names_in_model(model, stored)
        stored = {renamed[name]: weight for name, weight in stored.items()}

    # One mapping for each weight, of whose names any may be stored: the first that is.
    chosen: dict[str, WeightMapping] = {}
    ignored: dict[str, str] = {}
    for mapping in sorted(weight_map, key=lambda mapping: mapping.parts[0] not in stored):
        name, part = names[mapping.name], mapping.parts[0]
        first = chosen.setdefault(name, mapping._replace(name=name)).parts[0]
        if part != first and part in stored and are_equal(stored[part], stored[first]):
            ignored[part] = f"is a copy of {first}"

    # What the host's class computes itself, or has no use for.
    buffers = {name for name, _ in model.named_buffers()} - names.keys()
    for name in stored:
        if name in buffers or _matches(name, model._keys_to_ignore_on_load_unexpected):
            ignored[name] = f"is not used by {type(model).__name__}"
    for name, mapping in list(chosen.items()):
        is_computed = _matches(name, model._keys_to_ignore_on_load_missing)
        if is_computed and mapping.parts[0] not in stored:
            del chosen[name]
    return convert_weights(str(source), config, chosen.values(), stored, ignored=ignored)


def _matches(name: str, patterns: Any) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())
