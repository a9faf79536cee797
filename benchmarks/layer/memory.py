"""Memory: the peak of one training step beyond parameters and their gradients.

Each variant runs in a process of its own. On a CPU the peak is resident memory as the system sees
it, so that worker threads, scratch buffers of matrix libraries and pages that the allocator keeps
all count. On CUDA it is what torch's allocator has handed out.
"""

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

from benchmarks.cases import CASES, DTYPES, Variant, build_problem
from benchmarks.layer.peers import UnavailableError, build_peer, close_peers
from benchmarks.layer.variants import OURS

MEASURED = ("dense", "moe_dropless", "moe_capacity", "moe_static", "hf_grouped_mm")
REPEATS = 3

_PROCESS = Path("/proc/self")


def peak_mib(
    case_index: int, dtype_name: str, name: str, device: torch.device, threads: int
) -> float:
    """Returns the peak of a variant in MiB, measured in a fresh process.

    Raises:
        UnavailableError: When that process failed.
    """
    # The child is this file: see `main`.
    settings = [str(case_index), dtype_name, name, device.type, str(threads)]
    command = [sys.executable, "-m", "benchmarks.layer.memory", *settings]
    repository = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=repository)

    if done.returncode:
        error_lines = done.stderr.splitlines() or ["nothing said"]
        raise UnavailableError(f"the process ended with code {done.returncode}: {error_lines[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def can_measure(device: torch.device) -> bool:
    """Returns whether this system tells its peak: CUDA does, Linux does."""
    return device.type == "cuda" or (_PROCESS / "clear_refs").exists()


def measure_step(variant: Variant, device: torch.device) -> float:
    """Returns the peak of one forward and backward in bytes beyond parameters and their gradients.

    The backward pass holds its gradients only by and by, so that its peak counts without all of
    them and the peak of the forward pass counts as it is; the larger one is the result.
    """
    # The forward pass keeps what the backward pass needs.
    _release_memory()
    base = _reset_peak(device)
    y = variant.forward(variant.x)
    forward_peak = _peak(device) - base

    # The backward pass frees it again, while gradients come.
    _reset_peak(device)
    y.backward(variant.gradient)
    backward_peak = _peak(device) - base

    # What the gradients of the parameters take does not count.
    gradient_bytes = 0
    for parameter in variant.parameters:
        if parameter.grad is not None:
            gradient_bytes += parameter.numel() * parameter.element_size()
    del y
    variant.clear()
    return max(forward_peak, backward_peak - gradient_bytes)


def _release_memory() -> None:
    """Gives free memory back to the system, as far as the C library can."""
    # What the allocator keeps would count as in use.
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def _reset_peak(device: torch.device) -> int:
    """Makes the peak what is in use now, and returns that in bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)

    # 5 resets the peak of resident memory; see proc(5).
    (_PROCESS / "clear_refs").write_text("5", encoding="ascii")
    return _status_bytes("VmRSS")


def _peak(device: torch.device) -> int:
    """Returns the peak since the last reset in bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    """Returns a size of this process in bytes from the kernel's table."""
    for line in (_PROCESS / "status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(f"the kernel's table has no {name}")


def main() -> None:
    """Prints the peak of one variant in MiB: the child process of `peak_mib`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", type=int)
    parser.add_argument("dtype", type=str)
    parser.add_argument("variant", type=str)
    parser.add_argument("device", type=str)
    parser.add_argument("threads", type=int)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    problem = build_problem(CASES[options.case], DTYPES[options.dtype], device)
    build = OURS.get(options.variant) or partial(build_peer, options.variant)
    variant = build(problem)

    # A first step is not counted: libraries keep what they allocate for it.
    variant.run("forward_backward")
    variant.clear()
    peaks = [measure_step(variant, device) for _ in range(REPEATS)]
    print(json.dumps(statistics.median(peaks) / 2**20))
    close_peers()


if __name__ == "__main__":
    main()
