"""Memory: the peak of one training step beyond parameters and their gradients, each variant in a
process of its own.

On a CPU it is resident memory as the system sees it, so that worker threads, scratch buffers of
matrix libraries and pages that the allocator keeps all count. On CUDA it is what torch's allocator
has handed out.
"""

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.cases import CASES, DTYPES, Variant, build_problem
from benchmarks.peers import PEERS, UnavailableError, build_peer, close_peers
from benchmarks.variants import OURS

MEASURED = ("dense", "moe_dropless", "moe_capacity", "moe_static", "hf_grouped_mm")
REPEATS = 3


def peak_mib(
    case_index: int, dtype_name: str, name: str, device: torch.device, threads: int
) -> float:
    """Returns the peak of a variant in MiB, measured in a fresh process.

    Raises:
        UnavailableError: When that process failed.
    """
    settings = [str(case_index), dtype_name, name, device.type, str(threads)]
    command = [sys.executable, "-m", "benchmarks.memory", *settings]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    if done.returncode:
        reason = (done.stderr.splitlines() or ["nothing said"])[-1]
        raise UnavailableError(f"the process ended with code {done.returncode}: {reason}")
    return json.loads(done.stdout.splitlines()[-1])


def can_measure(device: torch.device) -> bool:
    """Returns whether this system tells its peak: CUDA does, Linux does."""
    return device.type == "cuda" or Path("/proc/self/clear_refs").exists()


def measure_step(variant: Variant, device: torch.device) -> float:
    """Returns the peak of one forward and backward in bytes beyond parameters and their gradients.

    The backward pass holds its gradients only by and by, so that its peak counts without all of
    them and the peak of the forward pass counts as it is; the larger one is the result.
    """
    _release()
    base = _reset_peak(device)
    y = variant.forward(variant.x)
    forward = _peak(device) - base
    _reset_peak(device)
    y.backward(variant.gradient)
    backward = _peak(device) - base
    gradients = sum(p.numel() * p.element_size() for p in variant.parameters if p.grad is not None)
    del y
    variant.clear()
    return max(forward, backward - gradients)


def _release() -> None:
    """Gives free memory back to the system, as far as the C library can."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _reset_peak(device: torch.device) -> int:
    """Makes the peak what is in use now, and returns that in bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def _peak(device: torch.device) -> int:
    """Returns the peak since the last reset in bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def _status(name: str) -> int:
    """Returns a size of this process in bytes from the kernel's table."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    """Prints the peak of one variant in MiB: the child of `peak_mib`."""
    parser = argparse.ArgumentParser()
    for name, kind in (
        ("case", int),
        ("dtype", str),
        ("variant", str),
        ("device", str),
        ("threads", int),
    ):
        parser.add_argument(name, type=kind)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    problem = build_problem(CASES[options.case], DTYPES[options.dtype], device)
    peer = options.variant in PEERS
    variant = build_peer(options.variant, problem) if peer else OURS[options.variant](problem)
    variant.run("forward_backward")
    variant.clear()
    print(
        json.dumps(statistics.median(measure_step(variant, device) for _ in range(REPEATS)) / 2**20)
    )
    close_peers()


if __name__ == "__main__":
    main()
