"""Host memory: keeps freed blocks for the next training step.

By default glibc gives large blocks back to the system when they are freed. Every step then gets its
activations and gradients as new pages, which the kernel fills with zeros one by one at the first
touch: for gradients of many experts that takes longer than their products.
"""

import ctypes
import os
import sys

# Numbers of malloc.h.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_THRESHOLD = -3

_NO_LIMIT = -1  # as a size it is the largest
_MOST_OF_OLD_LIBRARIES = 2**25  # bytes
_NEVER = 2**31 - 1
_SPARE = 2**26  # bytes

_VARIABLES = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
)
"""Any of them says how memory is taken: whoever sets one knows better."""


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
    is_kept = mallopt(_MMAP_THRESHOLD, _NO_LIMIT) or mallopt(
        _MMAP_THRESHOLD, _MOST_OF_OLD_LIBRARIES
    )
    return bool(is_kept and mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_TOP_PAD, _SPARE))
