"""What every benchmark says of the machine, and how it saves what it has measured."""

import datetime
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moe.files import whole_file


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Returns what measures, and when."""
    return {
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _device_name(device: torch.device) -> str:
    """Returns the name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    table = Path("/proc/cpuinfo")
    lines = table.read_text(encoding="utf-8").splitlines() if table.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def save_report(report: Mapping[str, Any], path: Path | None) -> None:
    """Writes a report, whole or not at all; None for no file."""
    if path:
        with whole_file(path) as partial:
            partial.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
