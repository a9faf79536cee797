"""A tiny NLLB-MoE beside that of transformers 4.57.6 and of the installed transformers, on a CPU.

Logits are compared with ours in float64, which the tests hold to the authors' formulas. All decode
greedily and in turn, each with one thread, of which the CPU time is measured. transformers 4.57.6
gets an environment of its own, with the same torch, which a later run reuses.
"""

import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

from benchmarks.machine import describe_machine, format_report, save_report
from benchmarks.timing import measure_in_turn, median_ratio
from moe.hosts.answering import load_model

ENVIRONMENT = Path("runs/transformers-4.57.6")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PACKAGES = (f"torch=={torch.__version__.partition('+')[0]}", "numpy", "transformers==4.57.6")
BATCHES = (1, 8)
NEW_TOKENS = 32
CONFIG = NllbMoeConfig(
    vocab_size=8000,
    d_model=256,
    encoder_ffn_dim=1024,
    decoder_ffn_dim=1024,
    encoder_layers=8,
    decoder_layers=8,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    num_experts=32,
)


def run_nllb_moe(rounds: int, json: Path | None) -> None:
    """Measures, prints the table and saves it.

    Args:
        rounds: How often everything decodes; times are medians.
        json: File to save to; None for none.
    """
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        inputs = write_model(Path(folder))
        with Peer(build_environment(), folder) as right, Peer(sys.executable, folder) as installed:
            peers = (right, installed)
            rows = measure(Path(folder), inputs, peers, rounds)
    report = {**describe_machine(torch.device("cpu")), "rounds": rounds, "rows": rows}
    save_report(report, json)
    print(format_report(report, COLUMNS))


def build_environment() -> Path:
    """Returns the Python of the environment of transformers 4.57.6."""
    python = ENVIRONMENT / "bin/python"
    if not (ENVIRONMENT / "finished").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
        pip = [python, "-m", "pip", "install", "--extra-index-url", CPU_INDEX]
        subprocess.run([*pip, *PACKAGES], check=True)
        (ENVIRONMENT / "finished").touch()
    return python


def write_model(folder: Path) -> dict[str, torch.Tensor]:
    """Writes a random model with transformers, and returns ids <int64>[B, L] of both stacks."""
    torch.manual_seed(0)
    model = NllbMoeForConditionalGeneration(CONFIG)
    for name, parameter in model.named_parameters():
        if "bias" in name or "router" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    names = ("input_ids", "decoder_input_ids")
    inputs = {name: torch.randint(3, CONFIG.vocab_size, (max(BATCHES), 32)) for name in names}
    torch.save(inputs, folder / "inputs.pt")
    return inputs


class Peer:
    """nllb_moe_peer.py in a process; a context that ends it.

    Attributes:
        version: Its version of transformers.
        logits: <float32>[B, T, V].
        cpu_seconds: CPU time of the process, after the last answer.
    """

    def __init__(self, python: Path | str, folder: str) -> None:
        script = Path(__file__).with_name("nllb_moe_peer.py")
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([python, "-I", script, folder], **pipes)
        self.version = self.read_line()
        self.logits = torch.load(Path(folder) / "logits.pt")
        self.cpu_seconds = 0.0

    def read_line(self) -> str:
        """Returns the next line of its output."""
        assert self.process.stdout is not None, "it is a pipe"
        line = self.process.stdout.readline()
        assert line, "the peer has ended; see its error above"
        return line.strip()

    def decode(self, batch: int) -> None:
        """Decodes a batch, and returns when that is done."""
        print(batch, NEW_TOKENS, file=self.process.stdin, flush=True)
        self.cpu_seconds = float(self.read_line())

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


@torch.inference_mode()
def measure(
    folder: Path, inputs: dict[str, torch.Tensor], peers: tuple[Peer, ...], rounds: int
) -> list[dict[str, Any]]:
    """Returns a row for each library and batch."""
    ours = load_model(folder)
    logits = {"ours": ours(**inputs).logits}
    logits |= {f"transformers {peer.version}": peer.logits for peer in peers}
    exact = load_model(folder, dtype=torch.float64)(**inputs).logits

    def cpu_time() -> float:
        """Returns the seconds of all processes, of which one runs at a time."""
        return time.process_time() + sum(peer.cpu_seconds for peer in peers)

    rows: list[dict[str, Any]] = []
    for batch in BATCHES:
        options = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS, "do_sample": False}
        ids = inputs["input_ids"][:batch]
        runs: Any = {"ours": partial(ours.generate, ids, **options)}
        runs |= {f"transformers {peer.version}": partial(peer.decode, batch) for peer in peers}
        times = list(measure_in_turn(runs, {}, rounds, torch.device("cpu"), cpu_time))
        for name in runs:
            milliseconds = statistics.median(round_[name] for round_ in times)
            row = {
                "batch": batch,
                "library": name,
                "difference": (logits[name] - exact).abs().max().item(),
                "largest_logit": exact.abs().max().item(),
                "tokens_per_second": 1000 * batch * NEW_TOKENS / milliseconds,
                "time_over_ours": median_ratio(times, name, "ours"),
            }
            rows.append(row)
    return rows


COLUMNS = [
    ("batch", "batch", ""),
    ("library", "library", ""),
    ("largest difference of logits", "difference", ".1e"),
    ("tokens/s", "tokens_per_second", ".0f"),
    ("its time over ours", "time_over_ours", ".2f"),
]
