"""Host memory: keeps freed blocks for the next training step.

By default glibc gives large blocks back to the system when they are freed. Every step then gets its
activations and gradients as new pages, which the kernel fills with zeros one by one at the first
touch: for gradients of many experts that takes longer than their products.
"""

import contextlib
import ctypes
import mmap
import os
import sys

import torch
from torch import Tensor

# Numbers of malloc.h.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_THRESHOLD = -3

_NO_LIMIT = -1  # as a size it is the largest
_LARGEST_BLOCK_OF_OLD_LIBRARIES = 2**25  # bytes
_NEVER = 2**31 - 1
_SPARE = 2**26  # bytes

_HUGE_PAGE = 2**21  # bytes

_VARIABLES = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
)
"""Any of them says how memory is taken: whoever sets one knows better."""


class _Setting:
    """Whether this process keeps freed blocks of any size."""

    keeps_all = False


def keep_freed_memory() -> bool:
    """Makes the C library keep freed memory, and returns whether it does.

    The process then holds on to the most memory that it ever needed, which training needs again in
    the next step.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _VARIABLES):
        return False

    # Other C libraries have no such function, or one that does nothing.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    keeps_all = bool(mallopt(_MMAP_THRESHOLD, _NO_LIMIT))
    is_kept = keeps_all or mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK_OF_OLD_LIBRARIES)
    is_kept = is_kept and mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_TOP_PAD, _SPARE)
    _Setting.keeps_all = bool(is_kept and keeps_all)
    return bool(is_kept)


def empty_in_few_pages(like: Tensor) -> Tensor:
    """Returns uninitialised memory whose first touch costs little.

    This is freed memory if the process keeps it, else new memory, in huge pages if available.

    Args:
        like: <float>[...] gives shape and dtype.

    Returns:
        <dtype of like>[...] of any values.
    """
    has_huge_pages = hasattr(mmap, "MADV_HUGEPAGE")
    if _Setting.keeps_all or like.nbytes < _HUGE_PAGE or not has_huge_pages:
        return torch.empty_like(like)

    memory = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
