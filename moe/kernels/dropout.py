"""Dropout on a CPU, four numbers to a draw.

torch draws a number of 53 bits for every element, which takes longer than all else that dropout
does, and keeps a mask as large as the activations. Whether an element is kept needs far fewer bits:
here one draw of 64 bits decides over four elements, and the mask holds a byte for each.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.kernels.torch_private import is_plain

_LEVELS = 2**16  # numbers that 16 bits can be
_DRAWS_PER_WORD = 4
_LOWEST_WORD = -(2**63)


class Dropout(nn.Dropout):
    """`torch.nn.Dropout`, with the numbers of `dropout`."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns <float>[...] of <float>[...]."""
        return dropout(input, self.p, training=self.training)


def dropout(x: Tensor, rate: float, *, training: bool = True) -> Tensor:
    """Sets a share of the elements to zero, and scales the others up; differentiably.

    Compilers, transforms and other devices get torch's operation, which draws other numbers.

    Args:
        x: <float>[...].
        rate: Share of the elements that becomes zero, rounded to a multiple of 2^-16.
        training: Whether to drop at all.

    Returns:
        <dtype of x>[...], kept elements divided by 1 - rate.
    """
    if not training or not rate:
        return x
    if x.device.type != "cpu" or rate >= 1 or not is_plain(x):
        return F.dropout(x, rate)

    kept = draw_kept(x.shape, rate)
    return _Dropout.apply(x, kept, 1 / (1 - rate))


def draw_kept(
    shape: torch.Size | tuple[int, ...],
    rate: float,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns which elements dropout keeps.

    Args:
        shape: Of the elements.
        rate: Share that is not kept, rounded to a multiple of 2^-16.
        generator: Of the CPU; None for torch's default one.

    Returns:
        <bool>[...] of that shape.
    """
    # One word of 64 random bits for four elements.
    num_elements = torch.Size(shape).numel()
    num_words = -(-num_elements // _DRAWS_PER_WORD)
    words = torch.empty(num_words, dtype=torch.int64)
    words.random_(_LOWEST_WORD, None, generator=generator)

    # A quarter of a word is uniform in [-2^15, 2^15): the lowest of these numbers drop.
    draws = words.view(torch.int16)[:num_elements].view(shape)
    num_dropped = min(round(rate * _LEVELS), _LEVELS - 1)
    return draws >= num_dropped - _LEVELS // 2


class _Dropout(torch.autograd.Function):
    """x * kept * scale, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.scale = scale
        return (x * kept).mul_(scale)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # named as what it is
        ctx: Any, d_output: Tensor
    ) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return (d_output * kept).mul_(ctx.scale), None, None
