"""Registry of other libraries' checkpoints that `from_pretrained` reads, by `model_type`.

The models know no other library. `moe.convert` enters its formats here when `moe` is imported.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe.checks import shown
from moe.errors import ConfigError
from moe.registry import Registry

OUR_MODEL_TYPE = "st_moe"


@dataclass(frozen=True)
class CheckpointFormat:
    """How checkpoints of another library become models of this one.

    Attributes:
        convert_config: Returns the fields of STMoEConfig for the content of a config.json.
        open_weights: Called as `open_weights(source, raw_config, config, leave_out=,
            use_safetensors=, **download)`: folder or hub name, its config.json, the STMoEConfig of
            the model, patterns of our names that the model does not have, and see
            `find_weight_files`. Returns our weights as LazyTensors by name.
    """

    convert_config: Callable[[Mapping[str, Any]], dict[str, Any]]
    open_weights: Callable[..., dict[str, Any]]


CHECKPOINT_FORMATS: Registry[CheckpointFormat] = Registry("checkpoint format")
"""By the `model_type` in config.json."""


def find_format(raw_config: Mapping[str, Any]) -> CheckpointFormat | None:
    """Returns the format of a config.json; None for ours and for one without a `model_type`.

    Args:
        raw_config: Content of the config.json.

    Raises:
        ConfigError: When no format has that `model_type`.
    """
    model_type = raw_config.get("model_type")
    if model_type in (None, OUR_MODEL_TYPE):
        return None

    known = CHECKPOINT_FORMATS.names()
    if model_type not in known:
        raise ConfigError(
            f"config.json is of a model of type {shown(model_type)}; expected "
            f"{OUR_MODEL_TYPE}, or {' or '.join(known)}, which are converted. Load it with its "
            "own class."
        )
    return CHECKPOINT_FORMATS.get(model_type)
