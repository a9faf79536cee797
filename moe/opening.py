"""Opens files to read without waiting for pipes and devices."""

import errno
import os
import stat
from pathlib import Path

# Windows, where `import moe` works too, lacks it.
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # a pipe that nobody writes to is opened at once


def open_to_read(path: Path | str, flags: int = os.O_RDONLY) -> int:
    """Returns a descriptor of a regular file; use it as the `opener` of `open`.

    A link to a regular file is followed, as in the cache of the Hugging Face hub.

    Raises:
        OSError: When the path is missing, a folder, a pipe or a device.
    """
    descriptor = os.open(path, flags | _NO_WAIT)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    if os.path.isdir(path):  # noqa: PTH112
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is a pipe or a device; expected a file", str(path))


def check_regular(path: Path) -> None:
    """Raises an OSError unless `path` is a regular file, before another library opens it."""
    os.close(open_to_read(path))


def read_regular(path: Path) -> bytes:
    """Returns the bytes of a regular file; see `open_to_read`."""
    with open(path, "rb", opener=open_to_read) as file:
        return file.read()
