"""Finds, registers and loads every host: importing this file imports each file of records/.

A new host is a new file there; nothing changes here.
"""

import importlib
import pkgutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

import moe.hosts.records
from moe.checkpoint.loading import (
    check_model_folder,
    load_complete,
    load_mapped,
    load_model_on_mesh,
)
from moe.checks import shown
from moe.distributed.mesh import Mesh
from moe.errors import ConfigError, did_you_mean
from moe.files import find_model
from moe.hosts.model import HOSTS, SparseHost
from moe.hosts.settings import HostSettings
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.pretrained import align_weights, refuse_not_finite
from moe.registry import Registry
from moe.sparse.editing import sparse_layers

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


def load_model(
    source: Path | str,
    *,
    mesh: Mesh | None = None,
    device: torch.device | str | None = None,
    dropless: bool = False,
    mmap: bool = False,
    **options: Any,
) -> Any:
    """Returns a model of this library, one that it converts, or a host, in evaluation mode.

    Args:
        source: `names`, which comes with the library, a folder, or a name of the hub.
        mesh: Ranks that share the experts of a model of ours in a folder, each of which keeps all
            other weights; None for the whole model.
        device: Device of the weights, without a mesh; None for the CPU.
        dropless: Whether experts have unlimited capacity in evaluation, regardless of config.json.
        mmap: Whether weights stay in their files until they are used, see `load_mapped`: for a
            folder of ours, on a CPU.
        options: Arguments of `from_pretrained`, e.g. `dtype`; with `mesh` or `mmap` only fields of
            STMoEConfig that differ.

    Raises:
        ConfigError: When it is another kind of model, or a setting is invalid.
        CheckpointError: When there is no model, or weights are missing, unexpected or damaged.
    """
    source = find_model(source)
    model_class = find_class(source, **options)
    if dropless:
        options |= _unlimited_capacity(model_class, source)
    if mesh is not None:
        config = STMoEConfig.from_pretrained(source, dispatch="ragged", **options)
        return load_model_on_mesh(source, mesh, config=config, gather=False)[0]
    if mmap:
        return load_mapped(source, **options)
    if not Path(source).is_dir():
        model = model_class.from_pretrained(source, **options)
    else:
        model = load_complete(model_class, source, **options)
        if not isinstance(model, STMoEForConditionalGeneration):  # ours does both itself
            refuse_not_finite(model, source)
            align_weights(model)
    return model if device is None else model.to(device)


def find_class(source: Path | str, **download: Any) -> Any:
    """Returns the class of a model: a host's, dense or sparse, or else ours.

    Args:
        source: A folder, or a string that may also be a name of the hub.
        download: `revision`, `token`, `cache_dir` and the like.

    Raises:
        CheckpointError: When a folder has no config.json, or one without a `model_type`.
    """
    if isinstance(source, Path) or Path(source).is_dir():
        model_type = check_model_folder(source)
    else:
        model_type = STMoEConfig.read_raw(source, **download).get("model_type")
    dense_types = {name: HOSTS.get(name).host.dense_class for name in HOSTS.names()}
    classes: dict[Any, Any] = {**dense_types, **_sparse_types()}
    return classes.get(model_type, STMoEForConditionalGeneration)


def count_parameters(source: Path | str) -> tuple[int, int]:
    """Returns the parameters of a model, and those that a token uses, without its weights.

    Args:
        source: A folder, or a name of the hub.
    """
    model_class = find_class(source)
    config = model_class.config_class.from_pretrained(source)
    if isinstance(config, STMoEConfig):
        return config.num_parameters(), config.num_active_parameters()

    # A token uses K of every E experts.
    with torch.device("meta"):
        model = model_class(config)
    model.tie_weights()
    total = model.num_parameters()
    idle = 0
    for layer in sparse_layers(model).values():
        E, K = layer.config.num_experts, layer.config.num_selected_experts
        idle += sum(weight.numel() for weight in layer.experts.parameters()) * (E - K) // E
    return total, total - idle


def _unlimited_capacity(model_class: Any, source: Path | str) -> dict[str, Any]:
    """Returns the fields of a model's configuration with which evaluation drops no token."""
    # Both names of the capacity: ours, and the one of Switch in transformers.
    fields = {"eval_capacity_factor": None, "expert_capacity": None}
    if issubclass(model_class, SparseHost):
        settings = HostSettings.from_config(model_class.config_class.from_pretrained(source))
        return {"sparse_layers": asdict(replace(settings, layer={**settings.layer, **fields}))}
    return fields if model_class is STMoEForConditionalGeneration else {}  # dense hosts have none


def _sparse_types() -> dict[str, type[SparseHost]]:
    """Returns the classes with sparse layers by their own `model_type`."""
    classes = [HOSTS.get(name) for name in HOSTS.names()]
    return {model_class.sparse_type(): model_class for model_class in classes}
