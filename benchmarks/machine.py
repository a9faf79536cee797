"""Common parts of all reports: the machine, the form of their tables, and how they are saved."""

import datetime
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from moe.files import whole_file
from moe.inspection.tables import format_table
from moe.kernels.product_choice import processor_name

Columns = Sequence[tuple[str, str | Callable[[Any], Any], str]]
"""The columns of a table: header, field of a row or function of it, and format of its values."""


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


def format_report(report: Mapping[str, Any], columns: Columns) -> str:
    """Returns a report as text: where and how often it was measured, and the table of its rows.

    Args:
        report: The report, which begins with `describe_machine` and `rounds`.
        columns: Columns of the table.
    """
    machine = f"{report['device']}, threads: {report['threads']}, torch {report['torch']}"
    table = report_table(columns, report["rows"])
    return f"{machine}, {report['rounds']} rounds\n\n{table}"


def report_table(columns: Columns, rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of rows; a cell is empty where its row has no such field, or None."""
    cells: list[list[str]] = []
    for row in rows:
        line: list[str] = []
        for _, field, form in columns:
            value = row.get(field) if isinstance(field, str) else field(row)
            line.append("" if value is None else format(value, form))
        cells.append(line)
    return format_table([header for header, _, _ in columns], cells)


def print_report(text: str, path: Path | None) -> None:
    """Prints a report, and where its table is saved."""
    print(text)
    if path is not None:
        print(f"The table is in {path}.")


def save_report(report: Mapping[str, Any], path: Path | None) -> None:
    """Writes a report, whole or not at all; None for no file."""
    if path is None:
        return

    with whole_file(path) as partial:
        partial.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _device_name(device: torch.device) -> str:
    """Returns the name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name()
