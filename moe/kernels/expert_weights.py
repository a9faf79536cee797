"""Stacked weights of experts, plain or quantized: by this library or by torchao."""

from typing import NamedTuple

from torch import Tensor


class ExpertWeights(NamedTuple):
    """Stacked weights of E experts, and their low-rank adapters.

    An adapter adds x A_e^T B_e^T to a product x W_e^T; both of its factors are None without one.

    Attributes:
        first: <float>[E, 2F or F, D] of the first product, gate above up.
        down: <float>[E, D, F] of the second.
        bias: <float>[E, F] of the hidden units; None for none.
        first_a: <float>[E, R, D] A of the first product.
        first_b: <float>[E, R, 2F or F] B^T of the first product, including the adapter's scale.
        down_a: <float>[E, R', F] A of the second.
        down_b: <float>[E, R', D] B^T of the second.
    """

    first: Tensor
    down: Tensor
    bias: Tensor | None
    first_a: Tensor | None = None
    first_b: Tensor | None = None
    down_a: Tensor | None = None
    down_b: Tensor | None = None


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
    weight = stacked[expert]
    if is_quantized(weight) or weight.dtype != like.dtype:
        return dequantized(weight).to(like.dtype)
    return weight
