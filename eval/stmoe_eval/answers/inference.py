"""Capacity and precision of a checkpoint in an evaluation: its own unless overridden.

Also reads the config.json of any checkpoint, without running code from its folder.
"""

from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from transformers import AutoConfig, PreTrainedConfig

from moe.checkpoint.loading import check_model_folder
from moe.errors import CheckpointError, ConfigError
from moe.models.configuration import STMoEConfig

Saved = Literal["saved"]
SAVED: Saved = "saved"
"""Keeps the checkpoint's own setting."""

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)


class Inference(NamedTuple):
    """Settings of an evaluation that override a checkpoint's own.

    Attributes:
        capacity_factor: Slots of an expert relative to an even share of the tokens; None for
            dropless, so that the result of an example does not depend on others.
        dtype: Precision of the weights and of the computation.
    """

    capacity_factor: float | Saved | None = SAVED
    dtype: Dtype | Saved = SAVED

    @property
    def options(self) -> str:
        """The command-line options that set it."""
        options: list[str] = []
        if self.capacity_factor is None:
            options.append("--dropless")
        elif self.capacity_factor != SAVED:
            options.append(f"--capacity-factor {self.capacity_factor:g}")
        if self.dtype != SAVED:
            options.append(f"--dtype {self.dtype}")
        return " ".join(options)


AS_SAVED = Inference()


def identity(fingerprint: str, inference: Inference) -> str:
    """Returns the identity of a model's answers: its files and settings."""
    return f"{fingerprint} {inference.options}".rstrip()


class ConfiguredModel(NamedTuple):
    """A checkpoint's config with an `Inference` applied.

    Attributes:
        config: Config of the checkpoint with the settings of the evaluation.
        changes: Settings of the evaluation that are not the checkpoint's own.
        settings: Fields of a config of this library that differ from the checkpoint's.
    """

    config: Any
    changes: Inference
    settings: dict[str, Any]


def configure(folder: Path, inference: Inference) -> ConfiguredModel:
    """Returns the config of a checkpoint with the settings of an evaluation.

    Raises:
        CheckpointError: When the folder holds no model.
        ConfigError: When the model cannot have such a capacity.
    """
    config = read_config(folder)
    changes = inference

    # Settings that equal the checkpoint's are not changes.
    own_dtype = str(config.dtype).removeprefix("torch.")
    if inference.dtype == own_dtype:
        changes = changes._replace(dtype=SAVED)
    settings = _capacity_settings(folder, config, inference)
    if not settings:
        changes = changes._replace(capacity_factor=SAVED)
        return ConfiguredModel(config, changes, settings)

    # A model of this library with another capacity.
    return ConfiguredModel(config.replaced(**settings), changes, settings)


def _capacity_settings(folder: Path, config: Any, inference: Inference) -> dict[str, Any]:
    """Returns the fields of a config that have to change for a capacity; none for a dense model."""
    factor = inference.capacity_factor
    if factor == SAVED:
        return {}

    # Other libraries' sparse models have their own capacities.
    if not isinstance(config, STMoEConfig):
        if getattr(config, "num_experts", 0):
            raise ConfigError(
                f"{folder} holds a sparse model of type {config.model_type!r}, whose capacity "
                f"{inference.options} cannot set. Convert it to this library's form: python -m "
                f"stmoe convert --from {folder} --to OUT."
            )
        return {}

    # A number of slots takes precedence over a factor, so it is removed.
    settings = {"eval_capacity_factor": factor, "expert_capacity": None}
    saved = {name: getattr(config, name) for name in settings}
    return {} if not config.num_experts or saved == settings else settings


def read_config(folder: Path) -> PreTrainedConfig:
    """Returns the config of a checkpoint of this library or of transformers.

    Raises:
        CheckpointError: When the folder holds none, or one that needs custom code.
    """
    check_model_folder(folder)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = loading_reason(error)
        raise CheckpointError(f"The config.json in {folder} cannot be read: {reason}") from error


def loading_reason(error: Exception) -> str:
    """Returns why transformers cannot load a part of a checkpoint."""
    if "trust_remote_code" in str(error):
        return (
            "it needs code that lies beside it, and such code is never run here. Give a checkpoint "
            "of this library, or of a type that transformers knows."
        )
    return str(error)


def describe_capacity(config: Any) -> str | None:
    """Returns the capacity of experts in an evaluation; None for a dense model."""
    if not getattr(config, "num_experts", 0):
        return None
    if not isinstance(config, STMoEConfig):
        return "that of transformers"

    # Slots or a factor, whichever applies.
    field = config.eval_capacity_field
    return "none" if field is None else f"{field} {getattr(config, field):g}"


def torch_dtype(inference: Inference) -> torch.dtype | None:
    """Returns the effective dtype; None for the checkpoint's own."""
    return None if inference.dtype == SAVED else getattr(torch, inference.dtype)
