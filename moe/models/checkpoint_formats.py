"""Registry of other libraries' checkpoints that `from_pretrained` reads, by `model_type`.

The models know no other library. `moe.convert` enters its formats here when `moe` is imported.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moe.checks import shown
from moe.errors import ConfigError
from moe.models.weight_files import LazyTensor
from moe.registry import Registry

OUR_MODEL_TYPE = "st_moe"


class OpenWeights(Protocol):
    """Opens a checkpoint as weights of ours."""

    def __call__(
        self,
        source: Path | str,
        raw_config: Mapping[str, Any],
        config: Any,
        *,
        leave_out: Iterable[str] = (),
        use_safetensors: bool | None = None,
        **download: Any,
    ) -> dict[str, LazyTensor]:
        """Returns our weights <any>[...] by name, each of which is read when it is indexed.

        Args:
            source: Folder or hub name of the checkpoint.
            raw_config: Content of its config.json.
            config: STMoEConfig of the model that takes the weights.
            leave_out: Regular expressions of our names that the model does not have.
            use_safetensors: See `find_weight_files`.
            download: `revision`, `token`, `cache_dir` and the like of transformers' `cached_file`.

        Raises:
            CheckpointError: When a tensor of the checkpoint is not accounted for.
        """
        ...


@dataclass(frozen=True)
class CheckpointFormat:
    """How checkpoints of another library become models of this one.

    Attributes:
        convert_config: Returns the fields of STMoEConfig for the content of a config.json.
        open_weights: Returns our weights.
    """

    convert_config: Callable[[Mapping[str, Any]], dict[str, Any]]
    open_weights: OpenWeights


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
