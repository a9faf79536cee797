"""Quantization: a model whose experts are stored in 8 or 4 bits, rounded to nearest.

Attention, routers, embeddings and dense layers stay as they are: experts are most of a sparse
model, and lose least by few bits. `from_pretrained` reads the model without float copies of its
experts (moe.kernels.quantized_weight).
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from moe.convert.formats import rewrite_checkpoint, split_weights
from moe.convert.weight_map import ConvertedCheckpoint
from moe.errors import ConfigError
from moe.kernels.quantized_weight import Quantization, quantize
from moe.models.configuration import STMoEConfig
from moe.models.quantized_checkpoint import stored_parts
from moe.sparse.experts import PROJECTIONS


def quantize_checkpoint(
    source: Path | str, folder: Path, quantization: Quantization, **download: Any
) -> STMoEConfig:
    """Writes a model with its experts quantized; holds one float tensor in memory at a time.

    Args:
        source: A folder of a sparse model of ours or of transformers' Switch, or a name of the hub.
        folder: Exists, and is empty.
        quantization: The bits, and in 4 bits the size of a group.
        download: `revision`, `token`, `cache_dir` and the like.

    Returns:
        The config of the quantized model.

    Raises:
        ConfigError: When the model is dense or quantized already, or the group's size does not
            divide its widths.
        CheckpointError: When a tensor of the source is not accounted for.

    Source:
        MoQE (arXiv:2310.02410): only experts, rounded to nearest. Differs: groups in 4 bits.
    """
    change = partial(quantize_weights, quantization=quantization)
    return rewrite_checkpoint(source, folder, change, **download)


def quantize_weights(
    checkpoint: ConvertedCheckpoint, quantization: Quantization
) -> ConvertedCheckpoint:
    """Returns the weights with experts quantized, each of which is computed when it is read."""
    config = checkpoint.config
    if not config.num_experts:
        raise ConfigError(
            "The model has no experts to quantize: num_experts is 0. Make it sparse first (stmoe "
            "upcycle), or quantize its linear modules by torchao."
        )
    fields = {name: value for name, value in quantization._asdict().items() if value is not None}
    config = config.replaced(expert_quantization=fields)
    parts = [_QuantizedParts(name, quantization) for name in checkpoint.weights]
    return checkpoint._replace(config=config, weights=split_weights(checkpoint.weights, parts))


class _QuantizedParts(NamedTuple):
    """A weight and the tensors that are stored for it.

    Attributes:
        name: Its name.
        quantization: How it is quantized, if it belongs to an expert's product.
    """

    name: str
    quantization: Quantization

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """Returns the tensors <any>[...] that are stored for the weight <any>[...], by name."""
        *_, owner, leaf = self.name.split(".")
        if owner == "experts" and leaf in PROJECTIONS:
            tensor = quantize(tensor, self.quantization)
        return stored_parts(self.name, tensor)
