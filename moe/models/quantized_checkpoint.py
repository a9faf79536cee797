"""The stored form of quantized experts: two or three tensors of a file for each weight.

A weight `gate_up_proj` is saved as `gate_up_proj_q`, `gate_up_proj_scale` and, in 4 bits,
`gate_up_proj_zero`; see QuantizedWeight.
"""

import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from moe.errors import CheckpointError
from moe.kernels.quantized_weight import QuantizedWeight
from moe.models.checkpoint_formats import COPY_AGAIN, CheckpointFormat
from moe.models.configuration import STMoEConfig
from moe.models.weight_files import LazyTensor, find_weight_files, open_weights


def stored_parts(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Returns the tensors <any>[...] that are saved for a weight, by name; a float weight is its own."""
    if not isinstance(weight, QuantizedWeight):
        return {name: weight}
    return {f"{name}_{part}": tensor for part, tensor in weight.parts().items()}


def stored_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors <any>[...] that are saved for a state dict, by name."""
    stored: dict[str, Tensor] = {}
    for name, weight in state.items():
        stored.update(stored_parts(name, weight))
    return stored


def join_parts(
    stored: Mapping[str, LazyTensor], source: Path | str, *, dequantize: bool = False
) -> dict[str, LazyTensor]:
    """Returns the weights of a file with quantized experts, by the names of the model.

    Args:
        stored: The tensors of the file.
        source: Its folder or hub name, for messages.
        dequantize: Whether the weights are read as floats instead of QuantizedWeights.

    Raises:
        CheckpointError: When a quantized weight has no scales.
    """
    weights = dict(stored)
    for codes_name in stored:
        if not re.search(r"\.experts\.\w+_proj_q$", codes_name):
            continue
        name = codes_name.removesuffix("_q")
        codes = weights.pop(codes_name)
        scale = weights.pop(f"{name}_scale", None)
        zero = weights.pop(f"{name}_zero", None)
        if scale is None:
            raise CheckpointError(f"{source} holds {codes_name} but no {name}_scale. {COPY_AGAIN}")
        codes_per_byte = 1 if zero is None else 2
        shape = (*codes.shape[:-1], codes_per_byte * codes.shape[-1])
        parts = [part for part in (codes, scale, zero) if part is not None]
        read = partial(_read_joined, parts, dequantize)
        weights[name] = LazyTensor(shape, scale.dtype, read)
    return weights


def _read_joined(parts: Iterable[LazyTensor], dequantize: bool) -> Tensor:
    """Returns the weight of its parts, which are copied: they may be pages of the file."""
    weight = QuantizedWeight(*(part.read().clone() for part in parts))
    return weight.dequantize() if dequantize else weight


def _open_quantized(
    source: Path | str,
    raw_config: Mapping[str, Any],
    config: STMoEConfig,
    *,
    leave_out: Iterable[str],
    use_safetensors: bool | None,
    **download: Any,
) -> dict[str, LazyTensor]:
    """Returns the weights of a model with quantized experts; see `CheckpointFormat`."""
    stored = open_weights(find_weight_files(source, use_safetensors=use_safetensors, **download))
    weights = join_parts(stored, source)
    for pattern in leave_out:
        weights = {name: weights[name] for name in weights if not re.search(pattern, name)}
    return weights


QUANTIZED = CheckpointFormat(convert_config=dict, open_weights=_open_quantized)
"""Our own format with quantized experts."""
