"""Two nodes on one machine: network namespaces joined by a virtual cable. Needs root on Linux."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

DEVICES = ("moe-node0", "moe-node1")
ADDRESSES = ("10.201.0.1", "10.201.0.2")

# Otherwise a node that returns waits in vain for an address that torch publishes only in the first round
# (dynamic_rendezvous.py of torch 2.13, `next_rendezvous`).
RETURNING = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def why_not():
    """Returns why this machine cannot have two nodes; empty if it can."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return "it needs root on Linux, and `ip` of iproute2"
    try:
        with two_nodes():
            return ""
    except subprocess.CalledProcessError as error:
        return error.stderr


@contextlib.contextmanager
def two_nodes():
    """Gives the names of two namespaces, whose processes are killed at the end."""
    names = [f"moe-{os.getpid()}-{node}" for node in (0, 1)]
    try:
        for name in names:
            ip("netns", "add", name)
        peer = ("peer", "name", DEVICES[1], "netns", names[1])
        ip("link", "add", DEVICES[0], "netns", names[0], "type", "veth", *peer)
        for name, device, address in zip(names, DEVICES, ADDRESSES, strict=True):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                kill(name)
                ip("netns", "del", name)


def torchrun(names, node, arguments, log):
    """Starts the rank of a node, which meets the other one on node 0 and may be started again."""
    command = ["ip", "netns", "exec", names[node], sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", "2", "--max-restarts", "3", "--rdzv-id", "two"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29501"]
    # Seconds between signs of life; a dead node is missed after three.
    settings = f"is_host={1 - node},keep_alive_interval=1"
    command += ["--local-addr", ADDRESSES[node], "--rdzv-conf", settings, *arguments]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICES[node], **RETURNING}
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def kill(name):
    """Kills all processes of a node, as a power failure does."""
    for pid in ip("netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def drop_link(name, device, seconds):
    """Loses every packet for some seconds."""
    ip("-n", name, "link", "set", device, "down")
    time.sleep(seconds)
    ip("-n", name, "link", "set", device, "up")
