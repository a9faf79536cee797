"""Stacked weights of experts, plain or quantized: by this library or by torchao."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class LowRank(NamedTuple):
    """Low-rank adapter of one product: it adds (x A_e^T * s) B_e^T to x W_e^T.

    Attributes:
        a: <float>[E, R, I] A.
        b: <float>[E, R, O] B^T, of any strides.
        scale: <float>[R] s.
    """

    a: Tensor
    b: Tensor
    scale: Tensor


class ExpertWeights(NamedTuple):
    """Stacked weights of E experts.

    Attributes:
        first: <float>[E, 2F or F, D] of the first product, gate above up.
        down: <float>[E, D, F] of the second.
        bias: <float>[E, F] of the hidden units; None for none.
        first_bias: <float>[E, 2F or F] b1, added to the first product; None for none.
        down_bias: <float>[E, D] b2, added to the second; None for none.
        first_adapter: Of the first product; None for none.
        down_adapter: Of the second product; None for none.
    """

    first: Tensor
    down: Tensor
    bias: Tensor | None
    first_bias: Tensor | None = None
    down_bias: Tensor | None = None
    first_adapter: LowRank | None = None
    down_adapter: LowRank | None = None

    def tensors(self) -> list[Tensor | None]:
        """Returns the eleven tensors for an operation of torch, None for absent ones."""
        absent = (None, None, None)
        return [*self[:5], *(self.first_adapter or absent), *(self.down_adapter or absent)]

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> "ExpertWeights":
        """Returns the weights of the result of `tensors`."""
        *weights, a, b, scale, down_a, down_b, down_scale = tensors
        first_adapter = None if a is None else LowRank(a, b, scale)
        down_adapter = None if down_a is None else LowRank(down_a, down_b, down_scale)
        return cls(*weights, first_adapter=first_adapter, down_adapter=down_adapter)


def is_quantized(weight: Tensor) -> bool:
    """Returns whether a weight is a quantized tensor, ours or of torchao."""
    return hasattr(weight, "qdata")


def dequantized(weight: Tensor) -> Tensor:
    """Returns the dequantized numbers of a quantized weight, and any other weight unchanged."""
    return weight.dequantize() if is_quantized(weight) else weight


def can_select_experts(stacked: Tensor) -> bool:
    """Returns whether one expert of a quantised stack can be had without the others."""
    try:
        stacked[0]
    except (AssertionError, NotImplementedError, RuntimeError):
        # Formats that pack several experts, or that do not support several.
        return False
    return True


def expert_weight(stacked: Tensor, expert: int, like: Tensor) -> Tensor:
    """Returns the weight <dtype of like>[O, I] of one expert; a quantised one is unpacked here.

    Args:
        stacked: <float>[E, O, I], plain or quantised, of any dtype.
        expert: Its index.
        like: <float>[...] of the dtype of the products.
    """
    return dequantized(stacked[expert]).to(like.dtype)
