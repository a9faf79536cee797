"""Two nodes on one machine: network namespaces, with a link of given bandwidth and latency between them.

A process is the link: it reads the packets of each node, holds them as long as the link would, and
writes them to the other node. So the kernel's TCP runs over it as over a cable. Needs Linux, root,
and `ip` of iproute2.
"""

import contextlib
import fcntl
import multiprocessing
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from moe.errors import ConfigError

ADDRESSES = ("10.201.0.1", "10.201.0.2")
"""Addresses of the nodes on the link."""

PORT = 29501
NUM_NODES = 2

# <linux/if_tun.h>: a device of IP packets, without a header of its own.
_TUN = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000

# Otherwise a node that returns waits in vain for an address that torch publishes only in the first round
# (dynamic_rendezvous.py of torch 2.13, `next_rendezvous`).
_RETURNING = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

_MTU = 9000  # bytes; jumbo frames, as clusters use them
_LONGEST_PACKET = 65536
_DEVICE = "moelink"


def why_not() -> str:
    """Returns why this machine cannot have two nodes; empty if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "it needs root on Linux"
    if shutil.which("ip") is None:
        return "`ip` of iproute2 is not installed"
    if not os.access(_TUN, os.W_OK):
        return f"{_TUN} cannot be opened"
    test = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if test.returncode == 0 else "it allows no network namespaces"


class TwoNodes:
    """Two nodes and the link between them, for the time of a `with` block.

    Args:
        bandwidth: Bytes per second in each direction.
        latency: Seconds from one node to the other.

    Raises:
        ConfigError: When this machine cannot have them.
    """

    def __init__(self, bandwidth: float, latency: float) -> None:
        reason = why_not()
        if reason:
            raise ConfigError(f"This machine cannot be two nodes: {reason}.")
        self._names = [f"moe-{os.getpid()}-{node}" for node in range(NUM_NODES)]
        self._link = (bandwidth, latency)
        self._is_up = multiprocessing.Value("b", 1)
        self._relay: Any = None

    def __enter__(self) -> "TwoNodes":
        devices: list[int] = []
        try:
            for node, name in enumerate(self._names):
                _run("ip", "netns", "add", name)
                device = f"{_DEVICE}{node}"
                devices.append(_open_tun(device))
                _run("ip", "link", "set", device, "netns", name)
                inside = ("ip", "-n", name)
                _run(*inside, "link", "set", "lo", "up")
                _run(*inside, "addr", "add", f"{ADDRESSES[node]}/24", "dev", device)
                _run(*inside, "link", "set", device, "mtu", str(_MTU), "up")
            context = multiprocessing.get_context("fork")
            arguments = (devices, *self._link, self._is_up)
            self._relay = context.Process(target=_carry, args=arguments, daemon=True)
            self._relay.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        finally:
            for device in devices:
                os.close(device)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for node in range(NUM_NODES):
            self.kill(node)
        if self._relay is not None:
            self._relay.terminate()
            self._relay.join()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def start(self, node: int, command: Sequence[str], log: IO[Any] | int) -> subprocess.Popen[Any]:
        """Starts a command on a node; gloo there uses the link.

        Args:
            node: 0 or 1.
            command: Program and arguments.
            log: File or descriptor of its output.
        """
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": f"{_DEVICE}{node}", **_RETURNING}
        argv = ["ip", "netns", "exec", self._names[node], *command]
        return subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def torchrun(
        self,
        node: int,
        arguments: Sequence[str],
        log: IO[Any] | int,
        *,
        ranks: int = 2,
        restarts: int = 0,
    ) -> subprocess.Popen[Any]:
        """Starts the ranks of a node; both nodes have to be started.

        Args:
            node: 0 or 1; the ranks meet on node 0.
            arguments: Of torchrun after its own options, e.g. `-m stmoe pretrain ...`.
            log: File or descriptor of the output.
            ranks: Ranks of the node.
            restarts: How often lost ranks are started again.
        """
        options = ["--nnodes", str(NUM_NODES), "--nproc-per-node", str(ranks)]
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}"]
        options += ["--rdzv-id", "two", "--max-restarts", str(restarts)]
        settings = f"is_host={1 - node},keep_alive_interval=1"  # seconds; a dead node is missed after three
        options += ["--local-addr", ADDRESSES[node], "--rdzv-conf", settings]
        launcher = [sys.executable, "-m", "torch.distributed.run", *options, *arguments]
        return self.start(node, launcher, log)

    def kill(self, node: int) -> None:
        """Kills all processes of a node, as a power failure does."""
        pids = subprocess.run(
            ["ip", "netns", "pids", self._names[node]], capture_output=True, text=True, check=False
        )
        for pid in pids.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    @contextlib.contextmanager
    def link_down(self) -> Iterator[None]:
        """Loses every packet while the block runs."""
        self._is_up.value = 0
        try:
            yield
        finally:
            self._is_up.value = 1


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"`{' '.join(command)}` failed: {done.stderr.strip()}.")


def _open_tun(name: str) -> int:
    """Returns the descriptor of a new TUN device, which carries its packets."""
    device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(device, _TUNSETIFF, request)
    return device


def _carry(devices: Sequence[int], bandwidth: float, latency: float, is_up: Any) -> None:
    """Carries packets between two devices for ever.

    A packet is sent when the one before it has been, which takes its bytes over the bandwidth, and
    arrives after the latency.
    """
    os.nice(-10)  # before the ranks, which share its cores
    sent_at = [0.0, 0.0]
    queues: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    while True:
        first = min((queue[0][0] for queue in queues if queue), default=None)
        wait = None if first is None else max(0.0, first - time.monotonic())
        readable, _, _ = select.select(devices, [], [], wait)
        for side, device in enumerate(devices):
            if device in readable:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        packet = os.read(device, _LONGEST_PACKET)
                        sent_at[side] = (
                            max(time.monotonic(), sent_at[side]) + len(packet) / bandwidth
                        )
                        if is_up.value:
                            queues[side].append((sent_at[side] + latency, packet))

            # What has arrived goes to the other node.
            while queues[side] and queues[side][0][0] <= time.monotonic():
                with contextlib.suppress(OSError):  # its device is gone or full: the packet is lost
                    os.write(devices[1 - side], queues[side][0][1])
                queues[side].popleft()
