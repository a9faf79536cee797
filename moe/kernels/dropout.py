"""Dropout on a CPU, with four random numbers per draw.

torch draws a number of 53 bits for every element, which takes longer than all else that dropout
does, and keeps a mask as large as the activations. Whether an element is kept needs far fewer bits:
here one draw of 64 bits decides over four elements, and the mask holds a byte for each. Rates that
16 bits cannot express well get a draw of 64 bits for each element.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.kernels.torch_private import is_plain

_BITS_PER_WORD = 64

# Largest rounding error of a rate, relative to the share that is dropped or kept, whichever is less.
# It is the relative error of E[y] too.
_TOLERANCE = 1e-3


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
        rate: Share of the elements that becomes zero; see `draw_kept`.
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
    shape: torch.Size | tuple[int, ...], rate: float, seed: Sequence[int] | None = None
) -> Tensor:
    """Returns which elements dropout keeps.

    Args:
        shape: Shape of the elements.
        rate: Share that is not kept, below 1; rounded to a multiple of 2^-16 where that changes
            neither share by more than a thousandth, and to one of 2^-64 elsewhere.
        seed: Integers of at least 0, of which every bit counts; None draws from torch's generator.

    Returns:
        <bool>[...] of that shape.
    """
    # Sixteen bits an element, or a whole word where those would miss the rate.
    rounded_rate = round(rate * 2**16) / 2**16
    is_close = abs(rounded_rate - rate) <= _TOLERANCE * min(rate, 1 - rate)
    bits = 16 if is_close else _BITS_PER_WORD
    num_elements = torch.Size(shape).numel()
    num_words = -(-num_elements * bits // _BITS_PER_WORD)
    if seed is None:
        words = torch.empty(num_words, dtype=torch.int64).random_(-(2**63), None)
    else:
        # torch's generator on a CPU takes 32 bits of a seed.
        generator = np.random.Generator(np.random.SFC64(seed))
        numbers = generator.integers(-(2**63), 2**63 - 1, num_words, np.int64, endpoint=True)
        words = torch.from_numpy(numbers)

    # A draw is uniform in [-2^15, 2^15), or [-2^63, 2^63): the lowest of these numbers drop.
    draws = words.view(torch.int16 if is_close else torch.int64)[:num_elements].view(shape)
    num_dropped = round(rate * 2**bits)
    return draws >= num_dropped - 2 ** (bits - 1)


class _Dropout(torch.autograd.Function):
    """x * kept * scale, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.scale = scale
        return (x * kept).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return (grad_outputs[0] * kept).mul_(ctx.scale), None, None
