"""How kernels of Triton are launched; those of experts are in triton_rows.py and triton_hidden.py.

Without a GPU Triton's interpreter runs them in numpy, where TRITON_INTERPRET is set before Triton
is imported.
"""

# Triton is for Linux alone.
# pyright: reportMissingImports=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from moe.errors import ConfigError

IS_INTERPRETED = bool(knobs.runtime.interpret)
"""Whether the kernels of this process run in Triton's interpreter."""

_LARGEST_BLOCK = 1024  # eight numbers of 16 bits for each thread of four warps
_SMALLEST_BLOCK = 16


def launch(kernel: Any, grid: tuple[int, ...], example: Tensor, *arguments: Any) -> None:
    """Runs a kernel, whose last argument is the dtype in which it computes.

    Args:
        kernel: Of Triton.
        grid: Programs along each axis; none at all run for a 0.
        example: <float>[...] on the device and of the dtype of the inputs.
        arguments: Of the kernel, but the last.

    Raises:
        ConfigError: When Triton's interpreter would compute wrong numbers.
    """
    # Wrong numbers would come without an error.
    if IS_INTERPRETED and example.dtype == torch.bfloat16:
        raise ConfigError(
            "Triton's interpreter takes the bits of bfloat16 for integers, and the rows are "
            "bfloat16. Run them in float32 or float16, or on a GPU without TRITON_INTERPRET."
        )
    if 0 in grid:
        return

    # Sums and activations have the precision of float32 at least.
    compute_dtype = tl.float64 if example.dtype == torch.float64 else tl.float32

    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(example):
        kernel[grid](*arguments, compute_dtype)


def block_size(width: int) -> int:
    """Returns how many of `width` numbers a program takes at once: a power of two."""
    return min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, triton.next_power_of_2(width)))
