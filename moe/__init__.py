"""Sparse Mixture-of-Experts encoder-decoder Transformers after ST-MoE (arXiv:2202.08906).

Importing the package registers its models with transformers' Auto classes. What is not named here
is imported from the module that defines it, e.g. `from moe.sparse.losses import RouterLosses`.
"""

import importlib
import warnings
from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoModelForTextEncoding

from moe.checkpoint.loading import load_complete, load_model_on_mesh
from moe.convert.formats import conversion_report
from moe.distributed.launch import launch
from moe.distributed.mesh import MeshConfig, build_mesh
from moe.errors import CheckpointError, ConfigError, DataError, DistributedError, MoEError
from moe.models.adapters import lora_config
from moe.models.configuration import STMoEConfig
from moe.models.encoder import STMoEEncoderModel
from moe.models.modeling import STMoEForConditionalGeneration, STMoEModel
from moe.models.parallelize import shard_model
from moe.models.presets import PRESETS
from moe.models.subsets import select_parameters
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
from moe.training.callback import RouterStatsCallback

__all__ = [
    "PRESETS",
    "ROUTERS",
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
    "add_stats",
    "assign_slots",
    "build_mesh",
    "collect_routers",
    "conversion_report",
    "edit_routing",
    "launch",
    "load_complete",
    "load_model_on_mesh",
    "lora_config",
    "record_routing",
    "replace_feed_forward",
    "replay_routing",
    "router_loss",
    "select_parameters",
    "shard_model",
    "summarize",
    "total_stats",
]

_MOVED = {
    "add_totals": "moe.sparse.losses.add_totals",
    "balance_totals": "moe.sparse.losses.balance_totals",
    "balance_within": "moe.sparse.losses.balance_within",
    "BalanceTotals": "moe.sparse.losses.BalanceTotals",
    "check_mesh": "moe.distributed.mesh.check_mesh",
    "check_model_folder": "moe.checkpoint.loading.check_model_folder",
    "ConversionReport": "moe.convert.report.ConversionReport",
    "did_you_mean": "moe.errors.did_you_mean",
    "FeedForwardSlot": "moe.sparse.integration.SparseFeedForwardAdapter",
    "load_routers": "moe.sparse.all_routers.load_routers",
    "locked_folder": "moe.files.locked_folder",
    "Mesh": "moe.distributed.mesh.Mesh",
    "mesh_limits": "moe.models.parallelize.mesh_limits",
    "model_card": "moe.models.card.model_card",
    "Registry": "moe.registry.Registry",
    "RouterLosses": "moe.sparse.losses.RouterLosses",
    "run_main": "moe.cli.run_main",
    "sum_stats": "moe.sparse.stats.sum_stats",
    "together": "moe.distributed.collectives.gather_or_raise",
    "whole_file": "moe.files.whole_file",
    "World": "moe.distributed.launch.World",
}
"""Public names of the release before, and where they are now. They go with the next release."""


def __getattr__(name: str) -> Any:
    """Returns the value of a moved name, with a warning at its first use."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    module, _, new_name = _MOVED[name].rpartition(".")
    value = getattr(importlib.import_module(module), new_name)
    globals()[name] = value
    warnings.warn(
        f"moe.{name} is now {_MOVED[name]}; the old name goes with the next release.",
        FutureWarning,
        stacklevel=2,
    )
    return value


AutoConfig.register("st_moe", STMoEConfig)
AutoModel.register(STMoEConfig, STMoEModel)
AutoModelForSeq2SeqLM.register(STMoEConfig, STMoEForConditionalGeneration)
AutoModelForTextEncoding.register(STMoEConfig, STMoEEncoderModel)
