"""Experts of a prefix for a sparse model: only texts that begin with it use them, all others answer as before.

They are added after the experts of every sparse layer, with their rows of the router. `stmoe finetune --parameters
new_experts` trains them alone.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe.checkpoint.loading import empty_model
from moe.checks import check, shown
from moe.convert.formats import rewrite_checkpoint
from moe.convert.weight_map import ConvertedCheckpoint
from moe.errors import ConfigError
from moe.models.configuration import STMoEConfig
from moe.models.weight_files import LazyTensor
from moe.sparse.config import SparseConfig
from moe.sparse.layer import SparseFeedForward
from moe.surgery.join import with_prefixes


def prefix_token_ids(tokenizer: Any, prefix: str) -> list[int]:
    """Returns the ids of the tokens with which texts with a prefix begin.

    Raises:
        ConfigError: When the prefix has no token, or a text after it changes its tokens.
    """
    token_ids = tokenizer(prefix, add_special_tokens=False).input_ids
    text = f"{prefix.rstrip()} word"
    is_beginning = tokenizer(text).input_ids[: len(token_ids)] == token_ids
    if not prefix.strip() or not is_beginning:
        raise ConfigError(
            f"A text such as {shown(text)} does not begin with the tokens of the prefix {shown(prefix)}. Choose a "
            "prefix that is a whole word, e.g. with a colon at its end."
        )
    return token_ids


def prefix_config(
    sparse: STMoEConfig, prefix: str, token_ids: list[int], num_experts: int
) -> STMoEConfig:
    """Returns the config of a sparse model with experts of one more prefix.

    Args:
        sparse: Config of the model before.
        prefix: The first characters of the texts.
        token_ids: Its tokens.
        num_experts: Experts of a layer after the addition; layers that differ grow by as many.

    Raises:
        ConfigError: When nothing would be added, the model has the prefix already, or its routers
            cannot have experts of one.
    """
    E = sparse.num_experts
    expected = f"more than {E}, the experts that the model has"
    check(num_experts > E, "num_experts", num_experts, expected)
    new = {"prefix": prefix, "token_ids": token_ids, "num_experts": num_experts - E}
    return with_prefixes(sparse, [*(sparse.prefix_experts or ()), new])


def add_prefix_experts(
    source: Path | str, folder: Path, config: STMoEConfig, **download: Any
) -> STMoEConfig:
    """Writes a model with experts of one more prefix; holds one tensor in memory at a time.

    Args:
        source: A folder of a sparse model, or a name of the hub.
        folder: Exists, and is empty.
        config: Result of `prefix_config`.
        download: `revision`, `token`, `cache_dir` and the like.

    Returns:
        The config of the new model.

    Raises:
        ConfigError: When the experts are quantized.
        CheckpointError: When a tensor of the source is not accounted for.
    """
    change = partial(with_prefix_experts, config=config)
    return rewrite_checkpoint(source, folder, change, **download)


def with_prefix_experts(sparse: ConvertedCheckpoint, config: STMoEConfig) -> ConvertedCheckpoint:
    """Returns the weights with the new experts at the end of each stack, each computed when it is read."""
    weights = dict(sparse.weights)
    for path, part in empty_model(config).named_modules():
        if isinstance(part, SparseFeedForward):
            draw = partial(_draw, part.config, path)
            for name, tensor in part.state_dict().items():
                weight = weights[f"{path}.{name}"]
                if weight.shape != tuple(tensor.shape):  # not that of shared experts
                    weights[f"{path}.{name}"] = _extended(weight, tensor.shape, partial(draw, name))
    return sparse._replace(config=config, weights=weights)


def _draw(config: SparseConfig, path: str, name: str) -> Tensor:
    """Returns the rows <float>[N, ...] of the experts of the last prefix in a new layer's weight."""
    settings = {"num_experts": config.prefix_experts[-1], "num_selected_experts": 1}
    settings |= {
        "num_shared_experts": 0,
        "prefix_experts": (),
        "router": "token_choice",
        "router_options": {},
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(path.encode()))
        return SparseFeedForward(replace(config, **settings)).state_dict()[name]


def _extended(weight: LazyTensor, shape: Sequence[int], draw: Callable[[], Tensor]) -> LazyTensor:
    """Returns a weight <any>[E, ...] with drawn rows after its own."""

    def read_each() -> Iterator[Tensor]:
        return chain(weight, draw().to(weight.dtype))

    return LazyTensor.of_rows(shape, weight.dtype, read_each)
