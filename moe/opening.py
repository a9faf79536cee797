"""Opens files that grow, such as logs and metrics, without following a link."""

import errno
import os
from pathlib import Path


def open_to_write(path: Path | str, flags: int) -> int:
    """Returns a descriptor of a file; the `opener` of `open`.

    Raises:
        OSError: When it is a link, or cannot be opened.
    """
    if Path(path).is_symlink():
        reason = "it is a link, and the file behind it would be changed; remove the link"
        raise OSError(errno.ELOOP, reason, str(path))
    return os.open(path, flags, 0o666)
