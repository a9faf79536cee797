"""What all models share: loading, saving, initialisation, activation checkpointing."""

from typing import Any, cast

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from moe.errors import ConfigError
from moe.models.attention import Projection, RelativePositionBias, RMSNorm
from moe.models.configuration import STMoEConfig
from moe.models.conversion import open_transformers
from moe.models.foreign_config import family_of
from moe.sparse.experts import Experts
from moe.sparse.router import Router

DOWNLOAD = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Arguments that say where a file of the hub comes from."""


class STMoEPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation shared by the models."""

    config: STMoEConfig
    config_class = STMoEConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["Block"]

    def __init__(self, config: STMoEConfig) -> None:
        super().__init__(config)
        self._can_compile_fullgraph = config.num_experts == 0 or config.dispatch == "static"

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the model of a folder or hub name, with weights that compute bit for bit what was saved.

        A T5 or Switch of transformers is converted as it is read, one shard at a time, and refused unless every one
        of its tensors is accounted for; see `conversion_report`. `save_pretrained` then writes our format.

        Arguments and results are those of transformers. Weights read from safetensors may lie at any address, and
        matrix products on a CPU round differently by address; each such weight is moved to an aligned one.

        Raises:
            CheckpointError: When tensors of a T5 or Switch are missing, unexpected or of another shape.
            ConfigError: When its config.json holds what this library cannot represent.
        """
        source, download = pretrained_model_name_or_path, {name: kwargs[name] for name in DOWNLOAD if name in kwargs}
        if _is_foreign(source, download):
            return cls._from_foreign(source, *args, download=download, **kwargs)
        result = super().from_pretrained(source, *args, **kwargs)
        model = result[0] if isinstance(result, tuple) else result
        for parameter in model.parameters():
            if parameter.device.type == "cpu" and parameter.data_ptr() % 64:
                parameter.data = parameter.data.clone()
        return result

    @classmethod
    def _from_foreign(cls, source: Any, *args: Any, download: dict[str, Any], **kwargs: Any) -> Any:
        """Returns the model of a T5 or Switch of transformers; see `from_pretrained`."""
        for name in ("variant", "key_mapping", "state_dict"):
            if kwargs.get(name) is not None:
                raise ConfigError(
                    f"from_pretrained got {name} {kwargs[name]!r} for {source}, a model of another library that is "
                    f"converted. Leave {name} out."
                )
        kwargs = {name: value for name, value in kwargs.items() if name not in DOWNLOAD}
        config = kwargs.pop("config", None)
        if not isinstance(config, STMoEConfig):
            settings = {"return_unused_kwargs": True, **download, **kwargs}
            config, kwargs = cast(Any, STMoEConfig.from_pretrained(config or source, **settings))
            kwargs = {name: value for name, value in kwargs.items() if name not in DOWNLOAD}
        generation = kwargs.pop("generation_config", None) or load_generation_config(source, download)
        use_safetensors = kwargs.pop("use_safetensors", None)
        foreign = open_transformers(
            source,
            config,
            leave_out=cls._keys_to_ignore_on_load_unexpected or (),
            use_safetensors=use_safetensors,
            **download,
        )
        foreign.report.refuse_unexplained()
        result = super().from_pretrained(
            None, *args, config=config, state_dict=foreign.weights, generation_config=generation, **kwargs
        )
        model = result[0] if isinstance(result, tuple) else result
        model.config.name_or_path = str(source)
        return result

    def chosen(self, name: str, argument: bool | None) -> bool:
        """Returns an argument of `forward`, or when it is None the config's field of that name."""
        return bool(getattr(self.config, name) if argument is None else argument)

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        """Switches activation checkpointing on or off; both public names of transformers come through here.

        Raises:
            ConfigError: When it would be reentrant, as it is by torch's default.
        """
        function = kwargs.get("gradient_checkpointing_func")
        if function is not None and getattr(function, "keywords", {}).get("use_reentrant") is not False:
            raise ConfigError(
                "Activation checkpointing was asked for without use_reentrant=False: the reentrant kind loses the "
                "gradient of the routers' losses. Add it to the keyword arguments, or give none."
            )
        cast(Any, super())._set_gradient_checkpointing(*args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draws the weights of one module anew; transformers keeps those that were loaded."""
        if isinstance(module, Experts | nn.Embedding | Projection | RelativePositionBias | RMSNorm | Router):
            module.reset_parameters()


def _is_foreign(source: Any, download: dict[str, Any]) -> bool:
    """Returns whether a folder or hub name holds a T5 or Switch of transformers."""
    if source is None:
        return False
    try:
        return family_of(PreTrainedConfig.get_config_dict(source, **download)[0]) is not None
    except OSError:
        return False  # no config.json: an adapter, or nothing; transformers says so


def load_generation_config(source: Any, download: dict[str, Any]) -> GenerationConfig:
    """Returns the generation settings of a folder or hub name: those of their own file, or else of config.json."""
    try:
        return GenerationConfig.from_pretrained(source, **download)
    except OSError:
        settings = {"config_file_name": "config.json", "_from_model_config": True, **download}
        return GenerationConfig.from_pretrained(source, **settings)
