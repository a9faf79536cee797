"""Memory of converting and quantizing a checkpoint in the layout of NLLB-MoE's on the hub.

It has all layers, experts and shards of the 54 billion parameters, and widths 8 times smaller, so
that its 3.4 GB are a 64th. Anonymous memory is what a process holds; pages of files, which the
system drops when it needs memory, are counted apart.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import NllbMoeConfig, NllbMoeModel

from benchmarks.machine import describe_machine, format_report, save_report

NUM_SHARDS = 23
CONFIG = NllbMoeConfig(
    vocab_size=32026,
    d_model=256,
    encoder_ffn_dim=1024,
    decoder_ffn_dim=1024,
    encoder_layers=24,
    decoder_layers=24,
)
COMMANDS = {
    "read names and shapes": ("convert",),
    "convert": ("convert", "--to"),
    "convert to bfloat16": ("convert", "--dtype", "bfloat16", "--to"),
    "quantize to 8 bits": ("quantize", "--bits", "8", "--to"),
    "quantize to 4 bits": ("quantize", "--bits", "4", "--to"),
}


def run_conversion(json: Path | None) -> None:
    """Measures, prints the table and saves it.

    Args:
        json: File to save to; None for none.
    """
    with TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        shard = write_checkpoint(source)
        rows: list[dict[str, Any]] = []
        for name, (verb, *options) in COMMANDS.items():
            target = [str(Path(folder) / name)] if options else []
            command = [
                sys.executable,
                "-m",
                "stmoe",
                verb,
                "--from",
                str(source),
                *options,
                *target,
            ]
            rows.append({"command": name, "shard": shard, **peak_memory(command)})
            rows[-1]["held"] = rows[-1]["anonymous"] - rows[0]["anonymous"]
    report = {**describe_machine(torch.device("cpu")), "rounds": 1, "rows": rows}
    save_report(report, json)
    print(format_report(report, COLUMNS))


def write_checkpoint(folder: Path) -> int:
    """Writes random weights in pickled shards, and returns the bytes of the largest."""
    with torch.device("meta"):
        weights = NllbMoeModel(CONFIG).state_dict()
    names = [name for name in weights if not name.endswith("embed_tokens.weight")]
    limit = sum(weights[name].nbytes for name in names) / NUM_SHARDS

    folder.mkdir()
    CONFIG.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    index: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name in names:
        shard[name] = torch.randn(weights[name].shape, generator=generator)
        size += shard[name].nbytes
        if size >= limit or name == names[-1]:
            number = len(set(index.values())) + 1
            file = f"pytorch_model-{number:05}-of-{NUM_SHARDS:05}.bin"
            torch.save(shard, folder / file)
            index |= dict.fromkeys(shard, file)
            shard = {}
            size = 0
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "pytorch_model.bin.index.json").write_text(text)
    return max(path.stat().st_size for path in folder.glob("*.bin"))


def peak_memory(command: list[str]) -> dict[str, float]:
    """Returns the largest memory of a command in bytes, and its seconds."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = {"RssAnon": 0, "RssFile": 0}
    while process.poll() is None:
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in peak:
                peak[name] = max(peak[name], 1024 * int(value.split()[0]))
        time.sleep(0.002)
    assert process.returncode == 0, command
    seconds = time.perf_counter() - start
    return {"anonymous": peak["RssAnon"], "of_files": peak["RssFile"], "seconds": seconds}


COLUMNS = (
    ("command", "command", ""),
    ("largest shard (MB)", lambda row: row["shard"] / 1e6, ".0f"),
    ("anonymous memory (MB)", lambda row: row["anonymous"] / 1e6, ".0f"),
    ("more than reading names", lambda row: row["held"] / 1e6, ".0f"),
    ("pages of files (MB)", lambda row: row["of_files"] / 1e6, ".0f"),
    ("seconds", "seconds", ".0f"),
)
