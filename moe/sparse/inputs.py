"""Checks the inputs of a sparse layer: shapes, dtypes and masks. Comes before groups.py.

Shapes and dtypes are checked always. Values are read on a CPU and outside of compiled graphs only:
elsewhere that would wait for the device, or break the graph.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe.checks import shown
from moe.errors import DataError
from moe.kernels.torch_private import is_plain

_MASK_ADVICE = "Give a bool mask, True for real tokens and False for padding"


def check_inputs(inputs: Mapping[str, Any], d_model: int) -> None:
    """Raises unless the inputs of a layer fit each other; None if not given.

    Args:
        inputs: `tokens` and `word_embeddings` <any float>[B, L, D], and others <any>[B, L], by name.
        d_model: Width of the layer, D.

    Raises:
        DataError: When one is not a tensor or has another shape, or the tokens are not of floats.
    """
    x = inputs["tokens"]
    shape = getattr(x, "shape", ())
    if len(shape) != 3 or shape[-1] != d_model or not x.is_floating_point():
        raise DataError(
            f"The sparse layer got x {_described(x)}; expected floats [B, L, {d_model}] (batch, length, d_model), "
            "not token ids."
        )

    # The others have one value, or one embedding, for each token of x.
    for name, value in inputs.items():
        expected = shape if name in ("tokens", "word_embeddings") else shape[:2]
        if value is not None and getattr(value, "shape", None) != expected:
            raise DataError(
                f"{name} is {_described(value)}, but x has {shape[0]} sequences of {shape[1]} tokens; expected "
                f"{list(expected)}."
            )


def to_bool_mask(token_mask: Tensor) -> Tensor:
    """Returns a mask as <bool>[...], True for real tokens.

    Args:
        token_mask: <bool>[...], or 0 for padding and 1 for real tokens in any dtype.

    Raises:
        DataError: When it holds something else, as additive masks of 0 and -inf do, or when it
            could be additive: all 0 in a floating dtype. Only on a CPU outside compiled graphs;
            elsewhere values of at most 0 are padding.
    """
    if token_mask.dtype == torch.bool:
        return token_mask
    if can_read_values(token_mask):
        _refuse_additive_mask(token_mask)
    return token_mask > 0


def _refuse_additive_mask(token_mask: Tensor) -> None:
    """Raises a DataError for a mask <any>[...] that holds more than 0 and 1, or may be additive."""
    # Additive masks hold 0 for real tokens and a large negative number for padding.
    odd_values = token_mask[(token_mask != 0) & (token_mask != 1)]
    if odd_values.numel():
        raise DataError(
            f"token_mask holds {shown(odd_values[0].item())}; expected 0 for padding and 1 for real tokens. "
            f"{_MASK_ADVICE}; for an additive mask with large negative numbers, use `mask == 0`."
        )

    # All zeros means only padding in a mask of 0 and 1, but no padding in an additive mask.
    if token_mask.is_floating_point() and token_mask.numel() and not token_mask.any():
        raise DataError(
            f"token_mask is 0 everywhere, in {token_mask.dtype}: either all tokens are padding, or it is an additive "
            f"mask that masks nothing. {_MASK_ADVICE}."
        )


def can_read_values(x: Tensor) -> bool:
    """Returns whether values <any>[...] can be read without waiting for a device or breaking a graph."""
    return x.device.type == "cpu" and is_plain(x)


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return shown(value)
    return f"of dtype {value.dtype} and shape {list(value.shape)}"
