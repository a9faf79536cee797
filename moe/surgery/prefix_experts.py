"""Experts of a prefix for a sparse model: only texts that begin with it use them, all others answer as before.

They are added after the experts of every sparse layer, with their rows of the router, and are copies of base experts:
drawn at random, they learned the names of a new language as well, but answered 9 instead of 15 % of those never seen.
`stmoe finetune --parameters new_experts` trains them alone.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe.checkpoint.loading import empty_model
from moe.checks import check, shown
from moe.convert.formats import rewrite_checkpoint
from moe.convert.weight_map import ConvertedCheckpoint
from moe.data.pipeline import Batch
from moe.models.configuration import STMoEConfig
from moe.sparse.editing import LayerKey, sparse_layers
from moe.surgery.expert_statistics import expert_statistics
from moe.surgery.join import with_prefixes
from moe.surgery.prune import best_experts, frequency, with_chosen_experts


def prefix_token_ids(tokenizer: Any, prefix: str) -> list[int]:
    """Returns the ids of the tokens with which texts with a prefix begin.

    Raises:
        ConfigError: When the prefix has no token, or a text after it changes its tokens.
    """
    token_ids = tokenizer(prefix, add_special_tokens=False).input_ids
    text = f"{prefix.rstrip()} word"
    is_beginning = tokenizer(text).input_ids[: len(token_ids)] == token_ids
    expected = f"a whole word, e.g. with a colon at its end: its tokens must begin {shown(text)}"
    check(bool(prefix.strip()) and is_beginning, "The prefix", prefix, expected)
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


def used_experts(model: Any, batches: Iterable[Batch], num_experts: int) -> dict[LayerKey, Tensor]:
    """Returns the base experts <int64>[N] that are most often a token's first choice, by layer.

    Args:
        model: A sparse model of ours.
        batches: Keyword arguments of its forward, with labels, of texts with the prefix.
        num_experts: How many, N.
    """
    used: dict[LayerKey, Tensor] = {}
    for key, statistics in expert_statistics(model, batches).items():
        num_base = sparse_layers(model)[key].config.num_base_experts
        used[key] = best_experts(frequency(statistics)[:num_base], num_experts)
    return used


def add_prefix_experts(
    source: Path | str,
    folder: Path,
    config: STMoEConfig,
    copied: Mapping[LayerKey, Tensor],
    **download: Any,
) -> STMoEConfig:
    """Writes a model with experts of one more prefix; holds one tensor in memory at a time.

    Args:
        source: A folder of a sparse model, or a name of the hub.
        folder: Exists, and is empty.
        config: Result of `prefix_config`.
        copied: <int64>[n] base experts of which the new ones are copies, in turn, by layer; see
            `used_experts`. Layers that are not named copy their first.
        download: `revision`, `token`, `cache_dir` and the like.

    Returns:
        The config of the new model.

    Raises:
        ConfigError: When the experts are quantized.
        CheckpointError: When a tensor of the source is not accounted for.
    """
    change = partial(with_prefix_experts, config=config, copied=copied)
    return rewrite_checkpoint(source, folder, change, **download)


def with_prefix_experts(
    sparse: ConvertedCheckpoint, config: STMoEConfig, copied: Mapping[LayerKey, Tensor]
) -> ConvertedCheckpoint:
    """Returns the weights with the new experts at the end of each stack, each read when it is indexed."""
    N = config.prefix_counts()[-1]
    chosen: dict[LayerKey, Tensor] = {}
    for key, layer in sparse_layers(empty_model(config)).items():
        originals = copied.get(key, torch.arange(layer.config.num_base_experts)).cpu()
        before = torch.arange(layer.config.num_experts - N)
        chosen[key] = torch.cat([before, originals[torch.arange(N) % len(originals)]])
    return with_chosen_experts(sparse, config, chosen)
