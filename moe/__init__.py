"""Sparse Mixture-of-Experts encoder-decoder Transformers after ST-MoE (arXiv:2202.08906).

Importing the package registers its models with transformers' Auto classes.
"""

import warnings
from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from moe.checkpoint.loading import check_model_folder, load_complete, load_model_on_mesh
from moe.cli import run_main
from moe.convert.formats import conversion_report
from moe.convert.report import ConversionReport
from moe.distributed.collectives import gather_or_raise
from moe.distributed.launch import World, launch
from moe.distributed.mesh import Mesh, MeshConfig, build_mesh, check_mesh
from moe.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DistributedError,
    MoEError,
    did_you_mean,
)
from moe.files import locked_folder, whole_file
from moe.models.adapters import lora_config
from moe.models.card import model_card
from moe.models.configuration import STMoEConfig
from moe.models.encoder import STMoEEncoderModel
from moe.models.modeling import STMoEForConditionalGeneration, STMoEModel
from moe.models.parallelize import mesh_limits, shard_model
from moe.models.presets import PRESETS
from moe.models.subsets import select_parameters
from moe.registry import Registry
from moe.sparse.all_routers import load_routers
from moe.sparse.config import SparseConfig
from moe.sparse.integration import (
    SparseFeedForwardAdapter,
    collect_routers,
    router_loss,
    total_stats,
)
from moe.sparse.layer import RouterOutput, SparseFeedForward
from moe.sparse.losses import (
    BalanceTotals,
    RouterLosses,
    add_totals,
    balance_totals,
    balance_within,
)
from moe.sparse.plan import DispatchPlan, RouterScores, assign_slots
from moe.sparse.router import ROUTERS, Router, RouterInputs
from moe.sparse.stats import RouterStats, add_stats, sum_stats, summarize
from moe.training.callback import RouterStatsCallback

__all__ = [
    "PRESETS",
    "ROUTERS",
    "BalanceTotals",
    "CheckpointError",
    "ConfigError",
    "ConversionReport",
    "DataError",
    "DispatchPlan",
    "DistributedError",
    "Mesh",
    "MeshConfig",
    "MoEError",
    "Registry",
    "Router",
    "RouterInputs",
    "RouterLosses",
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
    "World",
    "add_stats",
    "add_totals",
    "assign_slots",
    "balance_totals",
    "balance_within",
    "build_mesh",
    "check_mesh",
    "check_model_folder",
    "collect_routers",
    "conversion_report",
    "did_you_mean",
    "gather_or_raise",
    "launch",
    "load_complete",
    "load_model_on_mesh",
    "load_routers",
    "locked_folder",
    "lora_config",
    "mesh_limits",
    "model_card",
    "router_loss",
    "run_main",
    "select_parameters",
    "shard_model",
    "sum_stats",
    "summarize",
    "total_stats",
    "whole_file",
]

_DEPRECATED = {
    "FeedForwardSlot": "SparseFeedForwardAdapter",
}
"""Public names of the release before, and what they are called now. They go with the next release."""


def __getattr__(name: str) -> Any:
    """Returns what a deprecated name stands for, with a warning at its first use."""
    if name not in _DEPRECATED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    new_name = _DEPRECATED[name]
    value = globals()[name] = globals()[new_name]
    warnings.warn(
        f"moe.{name} is now called moe.{new_name}; the old name goes with the next release.",
        FutureWarning,
        stacklevel=2,
    )
    return value


AutoConfig.register("st_moe", STMoEConfig)
AutoModel.register(STMoEConfig, STMoEModel)
AutoModelForSeq2SeqLM.register(STMoEConfig, STMoEForConditionalGeneration)
