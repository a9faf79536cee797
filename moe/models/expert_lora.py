"""What PEFT refuses for stacked parameters and our sparse layers can do: dropout of adapters.

Imported only where peft is installed. Without dropout, PEFT's own classes do everything.
"""

import copy
from collections.abc import Mapping
from typing import Any

from peft import LoraConfig
from peft.tuners.lora import layer as peft_layer
from torch import nn

from moe.errors import ConfigError
from moe.sparse.experts import Experts

# They change the weight, or read one that stacked experts do not have.
_NOT_SUPPORTED = ("use_dora", "lora_bias", "fan_in_fan_out", "layer_replication")


def check_options(options: Mapping[str, Any]) -> None:
    """Raises a ConfigError for fields of `LoraConfig` that adapters of experts do not support."""
    refused = [name for name in _NOT_SUPPORTED if options.get(name)]
    if options.get("init_lora_weights", True) not in (True, False, "gaussian"):
        refused.append("init_lora_weights")
    for name in refused:
        raise ConfigError(
            f"{name}={options[name]!r} is not supported for adapters of experts. Leave it out, or pass experts=False."
        )


class ExpertLoraConfig(LoraConfig):
    """PEFT's configuration, with dropout for adapters of experts too.

    The dictionary that PEFT saves has none: plain PEFT refuses to load it for stacked parameters.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._register_custom_module({Experts: ParamWrapper})

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields by name, without dropout."""
        return {**super().to_dict(), "lora_dropout": 0.0}


class ParamWrapper(peft_layer.ParamWrapper):
    """PEFT's wrapper of a stacked parameter, which it knows by this name, with a rate of dropout."""

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, *, config: LoraConfig, **options: Any
    ) -> None:
        super().__init__(base_layer, adapter_name, config=_without_dropout(config), **options)
        self.lora_dropout[adapter_name] = nn.Dropout(config.lora_dropout)

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **options: Any
    ) -> None:
        """Adds an adapter, as in PEFT."""
        super().update_layer(adapter_name, r, lora_alpha, _without_dropout(config), **options)
        self.lora_dropout[adapter_name] = nn.Dropout(config.lora_dropout)

    def forward(self, x: Any, *args: Any, **options: Any) -> Any:
        """Runs PEFT's forward pass, which has no dropout; the layer calls it only where there are hooks."""
        if self.training and any(dropout.p for dropout in self.lora_dropout.values()):
            raise ConfigError(
                "lora_dropout of experts cannot be combined with hooks on PEFT's wrapper, such as those of "
                "adapter_names. Remove the hooks."
            )
        return super().forward(x, *args, **options)


def _without_dropout(config: LoraConfig) -> LoraConfig:
    config = copy.copy(config)
    config.lora_dropout = 0.0
    return config
