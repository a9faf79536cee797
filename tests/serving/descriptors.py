"""python -m tests.serving.descriptors: clients take all descriptors of a server's process, then leave."""

import resource
import socket
import time
from pathlib import Path

import pytest

from tests.serving.test_server import get, serving


def main() -> None:
    """Asks the server once there are descriptors again."""
    with serving(timeout=0.5) as address:
        assert get(address, "/health")  # uvicorn has imported all of itself

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 12, hard))
        connections = []
        try:
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    connections.append(
                        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
                    )
            time.sleep(1.5)
        finally:
            for connection in connections:
                connection.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert get(address, "/health")


if __name__ == "__main__":
    main()
