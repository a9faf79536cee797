"""Quantization: a model stored in 8 or 4 bits, rounded to nearest.

Experts alone are most of a large sparse model, and lose least by few bits: they stay quantized in
memory. A small model is stored in 8 bits whole, for a small file, and computes in floats again.
moe.models.weight_files describes the stored form.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from moe.convert.formats import Split, rewrite_checkpoint, split_weights
from moe.convert.weight_map import ConvertedCheckpoint
from moe.errors import ConfigError
from moe.kernels.quantized_weight import Quantization, quantize
from moe.models.weight_files import stored_parts

_EXPERTS = re.compile(r"\.experts\.\w+_proj$")
_MATRICES = re.compile(r"(_proj|(_proj|embed_tokens|lm_head|shared|\.fc[12])\.weight)$")


def quantize_checkpoint(
    source: Path | str,
    folder: Path,
    quantization: Quantization,
    *,
    whole: bool = False,
    **download: Any,
) -> PreTrainedConfig:
    """Writes a model with its experts quantized; holds one float tensor or expert in memory at a time.

    Args:
        source: A folder of a model of ours, a sparse host or a Switch, or a name of the hub.
        folder: Exists, and is empty.
        quantization: The bits, and in 4 bits the size of a group.
        whole: Whether embeddings, attention and dense layers are stored in 8 bits, too, and all of
            it is read as floats. Norms, biases, routers and tables of relative positions, which are
            small, stay as they are.
        download: `revision`, `token`, `cache_dir` and the like.

    Returns:
        The config of the quantized model.

    Raises:
        ConfigError: When the experts are quantized already, there are none and `whole` is False, or
            the group's size does not divide their widths.
        CheckpointError: When a tensor of the source is not accounted for.

    Source:
        MoQE (arXiv:2310.02410): only experts, rounded to nearest. Differs: groups in 4 bits.
    """
    change = partial(quantize_weights, quantization=quantization, whole=whole)
    return rewrite_checkpoint(source, folder, change, **download)


def quantize_weights(
    checkpoint: ConvertedCheckpoint, quantization: Quantization, *, whole: bool = False
) -> ConvertedCheckpoint:
    """Returns the weights quantized, each of which is computed when it is read."""
    config = checkpoint.config
    has_experts = any(_EXPERTS.search(name) for name in checkpoint.weights)
    is_readable = hasattr(config, "expert_quantization")  # dense hosts read floats
    if not has_experts and not (whole and is_readable):
        raise ConfigError(
            "The model has no experts to quantize. Make it sparse first (stmoe upcycle), or, if it is one of ours, "
            "store all of it in 8 bits (--all)."
        )
    if not whole:
        fields = {
            name: value for name, value in quantization._asdict().items() if value is not None
        }
        config = config.replaced(expert_quantization=fields)
    chosen = _MATRICES if whole else _EXPERTS
    splits: dict[str, Split] = {}
    for name in checkpoint.weights:
        splits[name] = partial(_stored, name, quantization if chosen.search(name) else None)
    return checkpoint._replace(config=config, weights=split_weights(checkpoint.weights, splits))


def _stored(name: str, quantization: Quantization | None, weight: Tensor) -> dict[str, Tensor]:
    """Returns the tensors <any>[...] that are stored for a weight <any>[...] or an expert's, by name."""
    if quantization is not None:
        weight = quantize(weight, quantization)
    return stored_parts(name, weight)
