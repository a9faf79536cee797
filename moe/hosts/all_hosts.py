"""Finds hosts; importing this file registers those of records.py, and NLLB-MoE, a sparse M2M100."""

from pathlib import Path
from typing import Any

from moe.checkpoint.loading import HOST_CLASSES, find_class
from moe.checks import shown
from moe.convert.host_weights import HOST_FORMATS, HostFormat
from moe.convert.nllb_moe import from_nllb_moe_config, nllb_moe_weight_map
from moe.errors import ConfigError, did_you_mean
from moe.hosts import records  # noqa: F401  registers them
from moe.hosts.model import HOSTS, SparseHost
from moe.planning.checkpoint import checkpoint_needs

# An early copy of the hub has the second name.
for _name in ("nllb-moe", "nllb_moe"):
    HOST_FORMATS[_name] = HostFormat(from_nllb_moe_config, nllb_moe_weight_map)
    HOST_CLASSES[_name] = HOSTS.get("m2m_100")


def find_host(model_type: Any) -> type[SparseHost]:
    """Returns the class with sparse layers of a dense host.

    Args:
        model_type: `model_type` of its configuration.

    Raises:
        ConfigError: When there is no such host, or its layers are sparse already; lists the known.
    """
    if issubclass(HOST_CLASSES.get(str(model_type), object), SparseHost):
        raise ConfigError(f"The model is a {model_type}, whose feed-forwards are sparse already.")
    if model_type not in HOSTS.names():
        raise ConfigError(
            f"The model_type in config.json is {shown(model_type)}; expected that of a T5 or of a model of ours, or "
            f"one of {', '.join(HOSTS.names())}.{did_you_mean(model_type, HOSTS.names())}"
        )
    return HOSTS.get(model_type)


def count_parameters(source: Path | str) -> tuple[int, int]:
    """Returns the parameters of a model, and those that a token uses, without its weights.

    Args:
        source: A folder, or a name of the hub.
    """
    config = find_class(source).config_class.from_pretrained(source)
    needs = checkpoint_needs(config)
    return (needs.experts + needs.rest) // 4, (needs.experts_of_token + needs.rest) // 4
