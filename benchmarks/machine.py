"""The machine of a report, and what it does at most: the rulers beside measured times."""

import datetime
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from moe.kernels.product_choice import processor_name
from moe.kernels.torch_private import onednn_linear

COPIED_BYTES = 2**28  # more than any cache holds
SQUARE_SIZES = {"cpu": 2048, "cuda": 8192}  # reading the matrices does not slow the product down
COPY = "copy"
SQUARE = "square"


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Returns the device, its threads and how they wait, torch's version and the time."""
    now = datetime.datetime.now(datetime.UTC)
    is_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else processor_name(),
        "threads": torch.get_num_threads(),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "spin_count": os.environ.get("GOMP_SPINCOUNT", "default"),
        "torch": torch.__version__,
        "date": now.isoformat(timespec="seconds"),
    }


def build_copy(device: torch.device) -> dict[str, Callable[[], object]]:
    """Returns a copy of large memory, to be measured in turn with others."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    return {COPY: partial(torch.empty_like(source).copy_, source)}


def build_squares(dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], object]]:
    """Returns a large square product by each library that torch has for it, likewise.

    On a CPU these are its BLAS and oneDNN in float32; in 16 bits torch calls oneDNN itself.
    """
    size = SQUARE_SIZES[device.type]
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    squares: dict[str, Callable[[], object]] = {SQUARE: partial(torch.mm, a, b.t())}
    if device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available():
        squares[f"{SQUARE} onednn"] = partial(onednn_linear, a, b)
    return squares


def square_tflops(round_: Mapping[str, float], device: torch.device) -> float:
    """Returns the TFLOP/s of the better library's square product in a round."""
    ms = min(ms for name, ms in round_.items() if name.startswith(SQUARE))
    return 2 * SQUARE_SIZES[device.type] ** 3 / ms / 1e9


def copy_gb_per_second(round_: Mapping[str, float]) -> float:
    """Returns the GB/s of the copy in a round, both read and written."""
    return 2 * COPIED_BYTES / round_[COPY] / 1e6
