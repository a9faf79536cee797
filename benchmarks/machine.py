"""What every report says of the machine, and how it is saved."""

import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moe.files import whole_file
from moe.kernels.product_measurement import processor_name


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Returns the device, its threads and how they wait, torch's version and the time."""
    now = datetime.datetime.now(datetime.UTC)
    return {
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "spin_count": os.environ.get("GOMP_SPINCOUNT", "default"),
        "torch": torch.__version__,
        "date": now.isoformat(timespec="seconds"),
    }


def machine_line(report: Mapping[str, Any], threads: str) -> str:
    """Returns the line of a table that says where and how often it was measured."""
    torch_version = f"torch {report['torch']}"
    return f"{report['device']}, {threads}, {torch_version}, {report['rounds']} rounds"


def format_number(value: float | None, form: str) -> str:
    """Returns a number as text; an empty text for None."""
    return "" if value is None else format(value, form)


def _device_name(device: torch.device) -> str:
    """Returns the name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name()


def save_report(report: Mapping[str, Any], path: Path | None) -> None:
    """Writes a report, whole or not at all; None for no file."""
    if path is None:
        return

    with whole_file(path) as partial:
        partial.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
