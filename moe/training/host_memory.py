"""Memory of the processor that a training step leaves to the next one."""

import ctypes
import os
import sys

# Numbers of malloc.h.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_THRESHOLD = -3

_LARGEST_BLOCK = 2**30  # bytes
_LARGEST_BLOCK_OF_OLD_LIBRARIES = 2**25
_NEVER = 2**31 - 1
_SPARE = 2**26

_VARIABLES = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
)
"""Any of them says how memory is taken: whoever sets one knows better."""


def keep_freed_memory() -> bool:
    """Has the C library keep what is freed, and returns whether it does.

    By default glibc gives large blocks back to the system when they are freed, and every step gets
    its activations and gradients as new pages, which the kernel fills with zeros one by one at the
    first touch. The process then holds on to the most memory that it ever needed, which a training
    needs again a step later.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _VARIABLES):
        return False

    # Other C libraries have no such function, or one that does nothing.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    is_kept = mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK)
    if not is_kept:
        is_kept = mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK_OF_OLD_LIBRARIES)
    is_kept = is_kept and mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_TOP_PAD, _SPARE)
    return bool(is_kept)
