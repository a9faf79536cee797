"""Opens files without following planted links and without waiting for pipes."""

import errno
import os
import stat
from pathlib import Path

# Windows, where `import moe` works too, has none of them.
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # a pipe that nobody writes to is opened at once
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


class NoRegularFileError(OSError):
    """A folder, a pipe or a device instead of a file, or a link where none is allowed."""


def open_to_read(path: Path | str, flags: int = os.O_RDONLY) -> int:
    """Returns a descriptor of a regular file; use it as the `opener` of `open`.

    A link to a regular file is followed, as in the cache of the Hugging Face hub.

    Raises:
        OSError: When the path is missing, a folder, a pipe or a device.
    """
    return _checked(os.open(path, flags | _NO_WAIT), path)


def open_to_write(path: Path | str, flags: int) -> int:
    """Returns a descriptor of a regular file, never through a link; the `opener` of `open`.

    Raises:
        OSError: When it is a link, a folder, a pipe or a device.
    """
    try:
        return _checked(os.open(path, flags | _NO_LINK | _NO_WAIT, 0o666), path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            reason = "it is a link, and the file behind it would be changed; remove the link"
            raise NoRegularFileError(error.errno, reason, str(path)) from error
        if error.errno in (errno.EISDIR, errno.ENXIO):  # a folder; a pipe that nobody reads
            raise _refusal(path) from error
        raise


def check_regular(path: Path) -> None:
    """Raises an OSError unless `path` is a regular file, before another library opens it."""
    os.close(open_to_read(path))


def read_regular(path: Path) -> bytes:
    """Returns the bytes of a regular file; see `open_to_read`."""
    with open(path, "rb", opener=open_to_read) as file:
        return file.read()


def _checked(descriptor: int, path: Path | str) -> int:
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise _refusal(path)


def _refusal(path: Path | str) -> NoRegularFileError:
    number = errno.EISDIR if os.path.isdir(path) else errno.EINVAL  # noqa: PTH112
    reason = (
        os.strerror(number)
        if number == errno.EISDIR
        else "it is a pipe or a device; expected a file"
    )
    return NoRegularFileError(number, reason, str(path))
