"""Sparse Mixture-of-Experts encoder-decoder Transformers after ST-MoE (arXiv:2202.08906).

Importing the package registers its models with transformers' Auto classes, and pipelines for the
tasks that transformers 5 removed. Names not listed here are imported from the module that defines
them, e.g. `from moe.sparse.losses import RouterLosses`.
"""

from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoModelForTextEncoding

from moe.checkpoint.final_model import save_model_on_mesh
from moe.checkpoint.loading import load_complete, load_model_on_mesh
from moe.convert.formats import conversion_report
from moe.distributed.launch import launch
from moe.distributed.mesh import MeshConfig, build_mesh
from moe.distributed.sharding import clip_gradient
from moe.errors import CheckpointError, ConfigError, DataError, DistributedError, MoEError
from moe.hosts.answering import load
from moe.models.configuration import STMoEConfig
from moe.models.encoder import STMoEEncoderModel
from moe.models.modeling import STMoEForConditionalGeneration, STMoEModel
from moe.models.parallelize import shard_model
from moe.models.presets import PRESETS
from moe.models.trainable_parameters import adapter_memory, lora_config, select_parameters
from moe.serving.batch_generator import BatchGenerator
from moe.serving.pipelines import register_pipelines
from moe.sparse.config import SparseConfig
from moe.sparse.editing import edit_routing
from moe.sparse.edits import DropExperts, RerouteExperts, SwapExperts
from moe.sparse.integration import (
    SparseFeedForwardAdapter,
    collect_routers,
    replace_feed_forward,
    router_loss,
    total_stats,
)
from moe.sparse.layer import RouterOutput, SparseFeedForward
from moe.sparse.plan import DispatchPlan, RouterScores, assign_slots
from moe.sparse.router import ROUTERS, Router, RouterInputs
from moe.sparse.stats import RouterStats, add_stats, summarize
from moe.tracing.recorder import record_routing
from moe.tracing.replay import replay_routing

if TYPE_CHECKING:
    from moe.training.callback import RouterStatsCallback

__all__ = [
    "PRESETS",
    "ROUTERS",
    "BatchGenerator",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DispatchPlan",
    "DistributedError",
    "DropExperts",
    "MeshConfig",
    "MoEError",
    "RerouteExperts",
    "Router",
    "RouterInputs",
    "RouterOutput",
    "RouterScores",
    "RouterStats",
    "RouterStatsCallback",
    "STMoEConfig",
    "STMoEEncoderModel",
    "STMoEForConditionalGeneration",
    "STMoEModel",
    "SparseConfig",
    "SparseFeedForward",
    "SparseFeedForwardAdapter",
    "SwapExperts",
    "adapter_memory",
    "add_stats",
    "assign_slots",
    "build_mesh",
    "clip_gradient",
    "collect_routers",
    "conversion_report",
    "edit_routing",
    "launch",
    "load",
    "load_complete",
    "load_model_on_mesh",
    "lora_config",
    "record_routing",
    "replace_feed_forward",
    "replay_routing",
    "router_loss",
    "save_model_on_mesh",
    "select_parameters",
    "shard_model",
    "summarize",
    "total_stats",
]


def __getattr__(name: str) -> Any:
    """Returns the callback, whose import takes a fifth of the time of all others."""
    if name == "RouterStatsCallback":
        from moe.training.callback import RouterStatsCallback

        return RouterStatsCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


AutoConfig.register("st_moe", STMoEConfig)
AutoModel.register(STMoEConfig, STMoEModel)
AutoModelForSeq2SeqLM.register(STMoEConfig, STMoEForConditionalGeneration)
AutoModelForTextEncoding.register(STMoEConfig, STMoEEncoderModel)
register_pipelines()
