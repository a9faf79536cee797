"""Sparse Mixture-of-Experts encoder-decoder Transformers after ST-MoE (arXiv:2202.08906).

Importing the package registers its models with transformers' Auto classes. More names are in the
packages for the layer (`moe.sparse`), the models (`moe.models`), checkpoints (`moe.convert`,
`moe.checkpoint`), several devices (`moe.distributed`) and routing traces (`moe.tracing`); all others
are imported from the module that defines them, e.g. `from moe.training.recipe import PretrainRecipe`.
"""

from moe.distributed.mesh import MeshConfig, build_mesh
from moe.distributed.sharding import clip_gradient
from moe.errors import CheckpointError, ConfigError, DataError, MoEError
from moe.hosts.answering import load
from moe.models.configuration import STMoEConfig
from moe.models.encoder import STMoEEncoderModel
from moe.models.lora import lora_config
from moe.models.modeling import STMoEForConditionalGeneration, STMoEModel
from moe.models.parallelize import shard_model
from moe.models.presets import PRESETS
from moe.serving.batch_generator import BatchGenerator
from moe.sparse.config import SparseConfig
from moe.sparse.editing import edit_routing
from moe.sparse.edits import DropExperts, RerouteExperts, SwapExperts
from moe.sparse.integration import collect_routers, replace_feed_forward
from moe.sparse.layer import RouterOutput, SparseFeedForward
from moe.sparse.router import Router
from moe.sparse.router_options import ROUTERS
from moe.sparse.stats import RouterStats
from moe.tracing.recorder import record_routing
from moe.tracing.replay import replay_routing

__all__ = [
    "PRESETS",
    "ROUTERS",
    "BatchGenerator",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DropExperts",
    "MeshConfig",
    "MoEError",
    "RerouteExperts",
    "Router",
    "RouterOutput",
    "RouterStats",
    "STMoEConfig",
    "STMoEEncoderModel",
    "STMoEForConditionalGeneration",
    "STMoEModel",
    "SparseConfig",
    "SparseFeedForward",
    "SwapExperts",
    "build_mesh",
    "clip_gradient",
    "collect_routers",
    "edit_routing",
    "load",
    "lora_config",
    "record_routing",
    "replace_feed_forward",
    "replay_routing",
    "shard_model",
]
