"""What all models share: loading, saving, initialisation, activation checkpointing."""

from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from moe.errors import ConfigError
from moe.models.attention import Projection, RelativePositionBias, RMSNorm
from moe.models.configuration import STMoEConfig
from moe.sparse.experts import Experts
from moe.sparse.router import Router


class STMoEPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation shared by the models."""

    config: STMoEConfig
    config_class = STMoEConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["Block"]

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Returns the model of a folder or hub name, with weights that compute bit for bit what was saved.

        Arguments and results are those of transformers. Weights read from safetensors may lie at any address, and
        matrix products on a CPU round differently by address; each such weight is moved to an aligned one.
        """
        result = super().from_pretrained(*args, **kwargs)
        model = result[0] if isinstance(result, tuple) else result
        for parameter in model.parameters():
            if parameter.device.type == "cpu" and parameter.data_ptr() % 64:
                parameter.data = parameter.data.clone()
        return result

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
