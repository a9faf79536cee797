"""Upcycles a host: the experts of a sparse layer are copies of its dense feed-forward."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from moe.checkpoint.loading import load_model
from moe.convert.formats import find_tokenizer_files
from moe.errors import ConfigError
from moe.hosts.all_hosts import find_host
from moe.hosts.blocks import HostFeedForward, prepare_blocks
from moe.hosts.host import Host
from moe.hosts.settings import HostSettings
from moe.models.weight_files import write_weight_sums
from moe.sparse.config import SparseConfig
from moe.surgery.upcycle import Upcycling, draw_router, expert_copies


def upcycle_host(model: PreTrainedModel, upcycling: Upcycling) -> Any:
    """Makes feed-forwards of a host sparse, and returns the model, which is changed in place.

    It becomes an instance of a subclass of its class. With the default settings it computes what it
    did. One dense layer is freed before the next one is copied.

    Example:
        model = AutoModelForSeq2SeqLM.from_pretrained("google/t5gemma-2b-2b-ul2")
        model = upcycle_host(model, Upcycling(num_experts=8))
        model.save_pretrained("sparse")  # load_model("sparse") in another process

    Args:
        model: An instance of a class that a record in moe/hosts/records.py names.
        upcycling: The settings; `fields` are of SparseConfig, or the weights of the losses in
            HostSettings.

    Raises:
        ConfigError: When the model is not a known host, or a setting does not fit it.
    """
    sparse_class = find_host(getattr(getattr(model, "config", None), "model_type", None))
    host = sparse_class.host
    if type(model) is not host.dense_class:
        raise ConfigError(
            f"upcycle_host got a {type(model).__name__}; expected a {host.dense_class.__name__}, "
            "whole and without adapters."
        )
    settings = HostSettings.from_upcycling(host, model, upcycling)
    sites = settings.sites(host, model)

    # The same object, with everything that it has besides the feed-forwards.
    sparse = cast(Any, model)
    sparse.config.__class__ = sparse_class.config_class
    sparse.config.sparse_layers = asdict(settings)
    sparse.__class__ = sparse_class
    sparse.settings = settings
    prepare_blocks(sparse, host)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(upcycling.seed)
        for block, of_layer in sites:
            _make_sparse(block, of_layer, host, upcycling)
    return sparse


@torch.no_grad()
def _make_sparse(block: Any, config: SparseConfig, host: Host, upcycling: Upcycling) -> None:
    """Puts a sparse layer of copies where a block has its dense layer."""
    down = block.get_submodule(host.down)  # D from F
    first = [block.get_submodule(name) for name in host.first]  # F from D each
    with torch.device("meta"):
        feed_forward = HostFeedForward(config)
    experts = cast(Any, feed_forward.sparse).experts

    # Stacked weights of all experts. Gates sum to 1, so that parts of a copy add b2 once.
    F = down.in_features
    up = torch.cat([linear.weight for linear in first])  # [2F or F, D]
    name = "gate_up_proj" if config.gated else "up_proj"
    weights: dict[str, Tensor] = {
        name: expert_copies(up, upcycling, F, is_down=False),
        "down_proj": expert_copies(down.weight, upcycling, F, is_down=True),
    }
    if config.product_bias:
        b1 = torch.cat([linear.bias for linear in first])  # [2F or F]
        weights[f"{name}_bias"] = expert_copies(b1[:, None], upcycling, F, is_down=False)[..., 0]
        weights["down_proj_bias"] = down.bias.repeat(config.num_experts, 1)  # [E, D]
    # A bias of hidden units without effect.
    if experts.bias is not None:
        initial = 1.0 if config.expert_bias == "multiplicative" else 0.0
        weights["bias"] = torch.full_like(experts.bias, initial, dtype=up.dtype, device=up.device)
    experts.load_state_dict(weights, assign=True)

    router = draw_router(config, upcycling)
    cast(Any, feed_forward.sparse).router = router.to(up)
    feed_forward.train(block.training)
    host.put_layer(block, feed_forward)


def upcycle_host_folder(
    source: Path | str, folder: Path, upcycling: Upcycling, **download: Any
) -> None:
    """Writes the upcycled model of a host, with its tokenizer and processor.

    Args:
        source: A folder of a dense host, or a name of the hub.
        folder: Exists, and is empty.
        upcycling: The settings; see `upcycle_host`.
        download: `revision`, `token`, `cache_dir` and the like.

    Raises:
        ConfigError: When it is not a known host, or a setting does not fit it.
        CheckpointError: When weights are missing, unexpected or damaged.
    """
    # Settings that do not fit are refused before the weights are read.
    config = AutoConfig.from_pretrained(source, **download)
    with torch.device("meta"):
        upcycle_host(find_host(config.model_type).host.dense_class(config), upcycling)
    model = load_model(source, **download)
    upcycle_host(model, upcycling).save_pretrained(folder)
    write_weight_sums(folder)
    for name, path in find_tokenizer_files(source, download).items():
        shutil.copyfile(path, folder / name)
