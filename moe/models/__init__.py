"""Configurations and encoder-decoder models built around the sparse layer."""

from moe.models.configuration import STMoEConfig
from moe.models.encoder import STMoEEncoderModel
from moe.models.lora import lora_config
from moe.models.modeling import STMoEForConditionalGeneration, STMoEModel
from moe.models.parallelize import shard_model
from moe.models.presets import PRESETS
from moe.models.trainable_parameters import select_parameters

__all__ = [
    "PRESETS",
    "STMoEConfig",
    "STMoEEncoderModel",
    "STMoEForConditionalGeneration",
    "STMoEModel",
    "lora_config",
    "select_parameters",
    "shard_model",
]
