"""Sparse Mixture-of-Experts encoder-decoder Transformers after ST-MoE (arXiv:2202.08906).

Importing the package registers its models with transformers' Auto classes.
"""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from moe.errors import CheckpointError, ConfigError, DataError, MoEError, did_you_mean, run_main
from moe.models.configuration import STMoEConfig
from moe.models.loading import load_complete
from moe.models.modeling import STMoEEncoderModel, STMoEForConditionalGeneration, STMoEModel
from moe.models.presets import PRESETS
from moe.registry import Registry
from moe.sparse.config import SparseConfig
from moe.sparse.layer import RouterOutput, SparseFeedForward
from moe.sparse.plan import DispatchPlan
from moe.sparse.stats import RouterStats, add_stats, summarize

__all__ = [
    "PRESETS",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DispatchPlan",
    "MoEError",
    "Registry",
    "RouterOutput",
    "RouterStats",
    "STMoEConfig",
    "STMoEEncoderModel",
    "STMoEForConditionalGeneration",
    "STMoEModel",
    "SparseConfig",
    "SparseFeedForward",
    "add_stats",
    "did_you_mean",
    "load_complete",
    "run_main",
    "summarize",
]

AutoConfig.register("st_moe", STMoEConfig)
AutoModel.register(STMoEConfig, STMoEModel)
AutoModelForSeq2SeqLM.register(STMoEConfig, STMoEForConditionalGeneration)
