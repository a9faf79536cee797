"""Time and peak memory of every command of surgery on a model as large as switch-base-8, with random weights.

    python -m benchmarks.surgery.base_size --demo runs/demo --json base_size.json

The demo gives the tokenizer and a few pairs. Each command is a process of its own, with one thread.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.machine import Columns, describe_machine, print_report, report_table, save_report
from moe import STMoEConfig, STMoEForConditionalGeneration
from moe.cli import Parser, path, run_main
from moe.data.tokenizer import load_tokenizer
from moe.errors import ConfigError
from moe.files import output_path

_PAIRS = 8
_GIB = 2**30
_COLUMNS: Columns = [
    ("command", "command", ""),
    ("seconds", "seconds", ".0f"),
    ("peak memory (GiB)", "peak_gib", ".2f"),
    ("weights before", "before_gib", ".2f"),
    ("after", "after_gib", ".2f"),
]


def main(argv: list[str]) -> None:
    """Measures all commands and prints the table."""
    parser = Parser(prog="python -m benchmarks.surgery.base_size", description="Measures.")
    parser.add_argument("--demo", type=path, required=True, help="folder of make demo")
    parser.add_argument("--json", help="file to save the table to")
    options = parser.parse_args(argv)
    file = output_path(options.json, suffix=".json", option="--json") if options.json else None

    with TemporaryDirectory() as folder:
        rows = measure_commands(options.demo, Path(folder))
    report = {**describe_machine(torch.device("cpu")), "threads": 1, "rows": rows}
    save_report(report, file)
    print_report(report_table(_COLUMNS, rows), file)


def measure_commands(demo: Path, folder: Path) -> list[dict[str, Any]]:
    """Returns a row for each command."""
    for name in ("t5-1.1-base", "switch-base-8"):
        save_random_model(STMoEConfig.from_preset(name), folder / name, demo)
    pairs = folder / "pairs.jsonl"
    words = {"inputs": "a few words of an example", "targets": "an answer"}
    pairs.write_text("\n".join([json.dumps(words)] * _PAIRS), encoding="utf-8")

    sparse = folder / "switch-base-8"
    data = ["--pairs", pairs]
    commands: dict[str, tuple[Path, list[str | Path]]] = {
        "upcycle --experts 8": (folder / "t5-1.1-base", []),
        "prune --keep 4": (sparse, data),
        "quantize --bits 8": (sparse, []),
        "quantize --bits 4": (sparse, []),
    }
    rows: list[dict[str, Any]] = []
    for number, (command, (source, more)) in enumerate(commands.items()):
        after = folder / f"after_{number}"
        rows.append(measure(command, [*command.split(), "--from", source, "--to", after, *more]))
        rows[-1] |= {"before_gib": weights_gib(source), "after_gib": weights_gib(after)}
        print(report_table(_COLUMNS, rows[-1:]), flush=True)

    distill = "distill --training.steps 2"
    out = folder / "distilled"
    settings = "--training.batch_size 2 --optim.cooldown_steps 0 --training.evaluate_every 2"
    argv = [*distill.split(), "--config", "distill_finetune", "--teacher", sparse, "--train", pairs]
    rows.append(measure(distill, [*argv, *settings.split(), "--out", out]))
    rows[-1] |= {"before_gib": weights_gib(sparse), "after_gib": weights_gib(out / "model")}
    return rows


def save_random_model(config: STMoEConfig, folder: Path, demo: Path) -> None:
    """Writes a model with random weights, beside the demo's tokenizer."""
    torch.manual_seed(0)
    STMoEForConditionalGeneration(config).save_pretrained(folder)
    load_tokenizer(demo / "tokenizer").save_pretrained(folder)


def measure(command: str, argv: Sequence[str | Path]) -> dict[str, Any]:
    """Returns the seconds and the peak memory of a command of stmoe.

    Raises:
        ConfigError: When the command fails; with what it printed last.
    """
    words = [sys.executable, "-m", "stmoe", *map(str, argv)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    with subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None, "it is a pipe"
        printed = process.stdout.read().decode(errors="replace")
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise ConfigError(f"stmoe {command} failed: {printed[-1000:]}")
    seconds = time.perf_counter() - start
    return {"command": command, "seconds": seconds, "peak_gib": peak_bytes(usage) / _GIB}


def peak_bytes(usage: resource.struct_rusage) -> int:
    """Returns the largest resident memory of a process, which macOS counts in bytes."""
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def weights_gib(folder: Path) -> float:
    """Returns the size of the weights of a model."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / _GIB


if __name__ == "__main__":
    run_main(main)
