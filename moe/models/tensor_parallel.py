"""Tensor parallelism by transformers: which parameter is sharded over the ranks, and how.

transformers shards the parameters as it loads them; the layers compute with their shards as they do
on a mesh of this library, see `parallelize.py`, whose rules the plan repeats.
"""

import re
from importlib.util import find_spec
from typing import Any, cast

from torch import nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedConfig

from moe.distributed.mesh import ExpertAxis, MeshConfig, MeshLimits, check_mesh
from moe.errors import ConfigError
from moe.models.attention import Attention
from moe.models.blocks import FeedForward, Stack
from moe.sparse.layer import SparseFeedForward

_OTHER_AXES = ("pp_size", "dp_replicate_size", "fsdp_size", "ep_size")


class TensorParallelMixin:
    """The methods by which transformers' models are sharded as they are loaded."""

    def init_parallel_plans(self) -> None:
        """Sets transformers' plans: `tp_plan` holds the rules of the config for this model's layers."""
        model = cast(Any, self)
        cast(Any, super()).init_parallel_plans()

        # The encoder is a model of transformers too, inside of another one.
        plan = model._tp_plan or {}
        if model.base_model is self:
            plan = model.config.base_model_tp_plan
        names = [name for name, _ in (*model.named_parameters(), *model.named_modules())]
        generic_names = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names}
        model._tp_plan = {name: style for name, style in plan.items() if name in generic_names}

    @classmethod
    def maybe_distribute_model(
        cls, model: nn.Module, distributed_config: Any, *args: Any, **kwargs: Any
    ) -> nn.Module:
        """Returns the model with its parameters sharded as `distributed_config` asks for.

        Raises:
            ConfigError: When it asks for more than tensor parallelism, or for ranks that do not
                divide the heads and hidden units.
        """
        mesh = next(iter((*args, *kwargs.values())), None)
        if mesh is not None:
            check_distributed_config(cast(Any, model).config, distributed_config)
        distributed = cast(Any, super()).maybe_distribute_model(
            model, distributed_config, *args, **kwargs
        )
        if mesh is not None:
            set_parallel_axes(distributed, None, distributed._device_mesh["tp"].get_group())
        return distributed

    def _get_static_cache_init_shape(self) -> Any:
        """Returns None for a sharded model, whose layers make their caches for the heads they have."""
        if (cast(Any, self)._tp_size or 1) > 1:
            return None
        return cast(Any, super())._get_static_cache_init_shape()


def set_parallel_axes(model: nn.Module, ep: ExpertAxis | None, tp: ProcessGroup | None) -> None:
    """Tells the layers of a model which ranks hold their other experts, heads and hidden units."""
    for module in model.modules():
        if isinstance(module, SparseFeedForward):
            module.set_parallel_axes(ep, tp)
        elif isinstance(module, Attention | FeedForward | Stack):
            module.tp = tp


def check_distributed_config(config: PreTrainedConfig, distributed: Any) -> None:
    """Refuses what transformers' `distributed_config` asks for and the model does not have.

    Args:
        config: An STMoEConfig.
        distributed: transformers' DistributedConfig.

    Raises:
        ConfigError: For another axis than `tp`, a plan of one's own, or a number of ranks that does
            not divide the heads and hidden units.
    """
    if find_spec("transformers.distributed.parallel_utils") is None:
        raise ConfigError(
            "Tensor parallelism by transformers needs a newer version of it, such as 5.23. "
            "Update it, or use moe.shard_model(model, moe.build_mesh(...))."
        )
    for name in _OTHER_AXES:
        size = getattr(distributed, name, None)
        if size is not None and size > 1:
            raise ConfigError(
                f"distributed_config has {name} {size}, but only tp_size is supported here. "
                "Experts over ranks, FSDP and mixtures of all: moe.shard_model(model, "
                "moe.build_mesh(...))."
            )
    if isinstance(distributed.tp_plan, dict):
        raise ConfigError(
            "distributed_config has a tp_plan of its own, but the layers compute with the shards "
            "of the model's plan. Give tp_size alone, or tp_plan='auto'."
        )

    # Every rank holds a part of each expert, so that their number does not matter.
    tp = distributed.tp_size
    limits = MeshLimits(tp, 0, config.num_heads, config.d_ff, None)
    check_mesh(MeshConfig(tp=tp), limits)
