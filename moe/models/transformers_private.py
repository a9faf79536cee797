"""Private names of transformers that the models call or override, and its tensor parallelism.

A private name may change in any release: tests/models/test_transformers_private.py says what breaks
when one disappears. Class attributes and methods by which every model of transformers declares
itself, such as `_no_split_modules` and `_init_weights`, are in the model classes.

transformers shards parameters as it loads them; the layers compute with their shards as on a mesh
of this library, see `parallelize.py`, whose rules the plan repeats.
"""

import math
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from moe.checks import is_kind, shown
from moe.distributed.mesh import MeshConfig, MeshLimits, check_mesh
from moe.errors import CheckpointError, ConfigError, did_you_mean
from moe.models.checkpoint_formats import COPY_AGAIN, read_json_object
from moe.models.configuration_checks import refuse_quantized
from moe.sparse.config import Dispatch

_OTHER_AXES = ("pp_size", "dp_replicate_size", "fsdp_size", "ep_size")


_WITHOUT_BIAS = ("flash", "flex", "paged", "/")
"""Parts of names of attention implementations that cannot add a bias; `/` occurs in hub names."""


def find_file(source: Path | str, name: str, **download: Any) -> Path | None:
    """Returns a file of a folder or hub name, downloaded if necessary; None when there is none."""
    path = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **download)
    return None if path is None else Path(path)


def load_generation_config(source: Path | str, download: dict[str, Any]) -> GenerationConfig:
    """Returns the generation settings of a folder or hub name.

    They are read from their own file, or else from config.json.

    Raises:
        CheckpointError: When the file is not a JSON object, or has a setting of a wrong type.
    """
    path = find_file(source, GENERATION_CONFIG_NAME, **download)
    if path is None:
        settings = {"config_file_name": CONFIG_NAME, "_from_model_config": True}
        return GenerationConfig.from_pretrained(source, **settings, **download)
    read_json_object(path)
    try:
        config = GenerationConfig.from_pretrained(source, **download)
        for name in ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id"):
            value = getattr(config, name)
            ids = value if isinstance(value, list) else [value]
            if not all(id is None or is_kind(id, int) for id in ids):
                raise ValueError(f"{name} is {shown(value)}; expected an id, or a list of ids")
        return config
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}. {COPY_AGAIN}") from error


def attention_implementation(config: PreTrainedConfig) -> str:
    """Returns transformers' name of the attention that a model uses."""
    return config._attn_implementation or "eager"


_EXPERTS_IMPLEMENTATION: dict[Dispatch, str] = {"ragged": "grouped_mm", "static": "batched_mm"}
"""Transformers' names of how the experts are run."""


class PrivateConfigHooks:
    """The private methods and properties of transformers' configurations that ours overrides."""

    dispatch: Dispatch

    @property
    def _experts_implementation(self) -> str:
        return _EXPERTS_IMPLEMENTATION[self.dispatch]

    @_experts_implementation.setter
    def _experts_implementation(self, implementation: Any) -> None:
        """Sets `dispatch` by transformers' name; None and "eager" change nothing.

        Raises:
            ConfigError: For an implementation that is not here.
        """
        # transformers also takes one name for each part of a model; this model has one part.
        name = implementation.get("") if isinstance(implementation, dict) else implementation
        if name in (None, "eager"):
            return
        for dispatch, known in _EXPERTS_IMPLEMENTATION.items():
            if name == known:
                self.dispatch = dispatch
                return
        raise ConfigError(
            f"experts_implementation is {name!r}; expected 'grouped_mm' (dispatch='ragged'), 'batched_mm' "
            "(dispatch='static'), or 'eager' to keep "
            f"dispatch.{did_you_mean(str(name), _EXPERTS_IMPLEMENTATION.values())} Experts with a capacity have no "
            "other kernel."
        )

    @classmethod
    def _dict_from_json_file(cls, json_file: str | os.PathLike[str]) -> dict[str, Any]:
        """Returns the object in a config.json; transformers reads each of them by this.

        Raises:
            CheckpointError: When the file is torn or holds something else.
        """
        return cast(Any, cls)._decode_special_floats(read_json_object(Path(json_file)))


class PrivateModelHooks:
    """The private methods of transformers' models that ours override."""

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> str:
        """Returns the implementation of attention that transformers uses.

        Raises:
            ConfigError: For an implementation that cannot add T5's position bias to the
                scores. It is raised before transformers looks for kernels on the hub.
        """
        name = attn_implementation
        if isinstance(name, str) and any(part in name for part in _WITHOUT_BIAS):
            raise ConfigError(
                f"attn_implementation is {name!r}; expected 'sdpa' or 'eager'. Attention scores get a trained "
                "position bias and a mask, which flash attention and hub kernels do not support; flex attention "
                "would need its own kernel. On a GPU 'sdpa' uses torch's memory-efficient kernel."
            )
        return cast(Any, super())._check_and_adjust_attn_implementation(name, *args, **kwargs)

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        """Switches activation checkpointing; both public names of transformers come through here.

        Raises:
            ConfigError: When it would be reentrant, as it is by torch's default.
        """
        function = kwargs.get("gradient_checkpointing_func")
        keywords = getattr(function, "keywords", {})
        if function is not None and keywords.get("use_reentrant") is not False:
            raise ConfigError(
                "Activation checkpointing was enabled without use_reentrant=False: reentrant checkpointing loses the "
                "gradient of the routers' losses. Add it to the keyword arguments, or pass none."
            )
        cast(Any, super())._set_gradient_checkpointing(*args, **kwargs)

    @contextmanager
    def _optimize_model_for_decode(self) -> Generator[None, None, None]:
        """Leaves the experts as they are in the block.

        transformers would switch to batched products, which here would read the weights of all
        experts instead of the few that a step uses.
        """
        yield

    def _get_static_cache_init_shape(self) -> Any:
        """Returns None for a sharded model, whose layers make their caches for the heads they have."""
        if (cast(Any, self)._tp_size or 1) > 1:
            return None
        return cast(Any, super())._get_static_cache_init_shape()

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
        """Returns the model with its parameters sharded as `distributed_config` requests.

        Raises:
            ConfigError: When it requests more than tensor parallelism, or a number of ranks that do
                not divide the heads and hidden units.
        """
        if distributed_config is not None:
            check_distributed_config(cast(Any, model).config, distributed_config)
        distributed = cast(Any, super()).maybe_distribute_model(
            model, distributed_config, *args, **kwargs
        )
        mesh = getattr(distributed, "_device_mesh", None)
        if mesh is not None:
            cast(Any, distributed).set_parallel_axes(None, mesh["tp"].get_group())
        return distributed


def check_distributed_config(config: PreTrainedConfig, distributed: Any) -> None:
    """Raises for parallelism in transformers' `distributed_config` that the model does not support.

    Args:
        config: An STMoEConfig.
        distributed: transformers' DistributedConfig.

    Raises:
        ConfigError: For another axis than `tp`, quantized experts, or a number of ranks that does not
            divide the heads and hidden units.
    """
    refuse_quantized(config, "sharded over ranks")
    for name in _OTHER_AXES:
        size = getattr(distributed, name, None)
        if size is not None and size > 1:
            raise ConfigError(
                f"distributed_config has {name} {size}, but only tp_size is supported here. For expert parallelism, "
                "FSDP or combinations, use moe.shard_model(model, moe.build_mesh(...))."
            )
    # Every rank holds a part of each expert, so their number does not matter.
    tp = distributed.tp_size
    d_ff = math.gcd(config.d_ff, config.expert_d_ff or 0)
    limits = MeshLimits(tp, (), config.num_heads, d_ff, None)
    check_mesh(MeshConfig(tp=tp), limits)


def tensor_parallel_plan(*, gated: bool) -> dict[str, str]:
    """Returns transformers' name for the layout of each parameter over tensor-parallel ranks.

    Every rank has a part of the heads, position biases and hidden units; embedding, head, norms and
    routers are whole. The layouts are those of `sharding_rules`.

    Args:
        gated: Whether feed-forward layers have a gate.
    """
    styles = {
        "feed_forward.up_proj.weight": "packed_colwise" if gated else "colwise",
        "feed_forward.down_proj.weight": "rowwise",
        "sparse_feed_forward.experts.gate_up_proj": "packed_colwise",
        "sparse_feed_forward.experts.up_proj": "colwise",
        "sparse_feed_forward.experts.down_proj": "rowwise",
        "sparse_feed_forward.experts.bias": "embedding_colwise",  # by its second dimension
    }
    for attention in ("self_attention", "cross_attention"):
        for projection in ("q_proj", "k_proj", "v_proj"):
            styles[f"{attention}.{projection}.weight"] = "colwise"
        styles[f"{attention}.o_proj.weight"] = "rowwise"

    plan: dict[str, str] = {}
    for stack in ("encoder.stack", "decoder"):
        plan[f"{stack}.position_bias.table"] = "rowwise"
        for name, style in styles.items():
            plan[f"{stack}.blocks.*.{name}"] = style
    return plan
