"""Finds, registers and loads every host: importing this file imports each file of records/.

A new host is a new file there; nothing changes here.
"""

import importlib
import pkgutil
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForSeq2SeqLM

import moe.hosts.records
from moe.checkpoint.loading import check_model_folder, load_complete
from moe.checks import shown
from moe.errors import ConfigError, did_you_mean
from moe.hosts.model import HOSTS, SparseHost
from moe.models.pretrained import align_weights, refuse_not_finite
from moe.registry import Registry

for module in pkgutil.iter_modules(moe.hosts.records.__path__):
    importlib.import_module(f"moe.hosts.records.{module.name}")

for name in HOSTS.names():
    model_class = HOSTS.get(name)
    AutoConfig.register(model_class.sparse_type(), model_class.config_class, exist_ok=True)
    AutoModelForSeq2SeqLM.register(model_class.config_class, model_class, exist_ok=True)


def load_hosts() -> Registry[type[SparseHost]]:
    """Returns HOSTS with every file of moe/hosts/records in it."""
    return HOSTS


def find_host(model_type: Any) -> type[SparseHost]:
    """Returns the class with sparse layers of a dense host.

    Args:
        model_type: `model_type` of its configuration.

    Raises:
        ConfigError: When there is no such host, or its layers are sparse already; lists the known.
    """
    if model_type in _sparse_types():
        raise ConfigError(f"The model is a {model_type}, whose feed-forwards are sparse already.")
    if model_type not in HOSTS.names():
        raise ConfigError(
            f"The model_type in config.json is {shown(model_type)}; expected that of a T5 or of a model of ours, or "
            f"one of {', '.join(HOSTS.names())}.{did_you_mean(model_type, HOSTS.names())}"
        )
    return HOSTS.get(model_type)


def load_host(folder: Path | str, **options: Any) -> Any:
    """Returns the host with sparse layers that `save_pretrained` wrote into a folder.

    Its settings are in config.json, and no code is in the folder. After `import moe.hosts.all_hosts`
    transformers' AutoModelForSeq2SeqLM loads it too; before that it raises, because it does not
    know the `model_type`.

    Args:
        folder: The folder.
        options: Arguments of `from_pretrained`.

    Raises:
        ConfigError: When the folder holds another kind of model, or a setting is invalid.
        CheckpointError: When there is no model, or weights are missing, unexpected or damaged.
    """
    model_type = check_model_folder(folder)
    sparse_types = _sparse_types()
    if model_type not in sparse_types:
        raise ConfigError(
            f"{folder} holds a {model_type}, which is no host with sparse layers. "
            f"Known: {', '.join(sparse_types)}."
        )
    model = load_complete(sparse_types[model_type], folder, **options)
    refuse_not_finite(model, folder)
    align_weights(model)
    return model


def _sparse_types() -> dict[str, type[SparseHost]]:
    """Returns the classes with sparse layers by their own `model_type`."""
    classes = [HOSTS.get(name) for name in HOSTS.names()]
    return {model_class.sparse_type(): model_class for model_class in classes}
