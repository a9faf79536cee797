"""Decoding with experts in 8 and 4 bits, beside floats of 32 and 16 bits, on a CPU."""

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.machine import Columns, describe_machine, print_report, report_text, save_report
from benchmarks.timing import measure_in_turn, median_ratio
from moe.kernels.host_memory import keep_freed_memory
from moe.kernels.quantized_weight import Quantization
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.surgery.quantize import quantize_checkpoint

BITS = {"int8": Quantization(8), "int4": Quantization(4, 32)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BASE = ("float32", "bfloat16")

SIZES: Mapping[str, Any] = {
    "d_model": 768,
    "d_ff": 2048,
    "num_layers": 4,
    "num_experts": 8,
    "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 2,
    "eval_capacity_factor": None,
}


@dataclass(frozen=True)
class QuantizedBenchmark:
    """What to measure.

    Attributes:
        batches: Sequences to decode at once.
        rounds: Results are medians over so many.
        json: File to save the table to; None for none.
        input_length: Tokens of the encoder.
        new_tokens: Tokens to decode.
    """

    batches: Sequence[int]
    rounds: int
    json: Path | None = None
    input_length: int = 64
    new_tokens: int = 32


@torch.no_grad()
def run_quantized(benchmark: QuantizedBenchmark) -> None:
    """Measures, prints a table and saves it."""
    keep_freed_memory()
    models, megabytes = build_models()
    rows = []
    for batch in benchmark.batches:
        times = _measure(benchmark, models, batch)
        for name in models:
            row = {"batch": batch, "model": name, "megabytes": megabytes[name]}
            row["ms"] = statistics.median(round_[name] for round_ in times)
            rows.append(row | {base: median_ratio(times, name, base) for base in BASE})
    report = {**describe_machine(torch.device("cpu")), "rounds": benchmark.rounds, "rows": rows}
    report["sizes"] = dict(SIZES)
    save_report(report, benchmark.json)
    print_report(report_text(report, f"{report['threads']} threads", COLUMNS), benchmark.json)


def build_models() -> tuple[dict[str, STMoEForConditionalGeneration], dict[str, float]]:
    """Returns the models by name, and the megabytes of their files."""
    models: dict[str, STMoEForConditionalGeneration] = {}
    megabytes: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for dtype_name, dtype in DTYPES.items():
            folder = Path(temporary) / dtype_name
            torch.manual_seed(0)
            model = STMoEForConditionalGeneration(STMoEConfig(**SIZES))
            torch.nn.Module.to(model, dtype=dtype)
            model.save_pretrained(folder)
            folders = {dtype_name: folder}
            for name, quantization in BITS.items():
                folders[f"{name}, {dtype_name}"] = target = Path(temporary) / name / dtype_name
                target.mkdir(parents=True)
                quantize_checkpoint(folder, target, quantization)
            for name, source in folders.items():
                models[name] = STMoEForConditionalGeneration.from_pretrained(source)
                megabytes[name] = (source / "model.safetensors").stat().st_size / 1e6
    return models, megabytes


def _measure(
    benchmark: QuantizedBenchmark, models: Mapping[str, Any], batch: int
) -> list[dict[str, float]]:
    """Returns the milliseconds of greedy decoding of each model, round by round."""
    generator = torch.Generator().manual_seed(batch)
    shape = (batch, benchmark.input_length)
    inputs = torch.randint(2, STMoEConfig.vocab_size, shape, generator=generator)
    length = {"min_new_tokens": benchmark.new_tokens, "max_new_tokens": benchmark.new_tokens}
    runs: dict[str, Callable[[], object]] = {}
    for name, model in models.items():
        runs[name] = partial(model.generate, inputs, do_sample=False, **length)
    rounds = measure_in_turn(runs, {}, benchmark.rounds, torch.device("cpu"))
    return list(tqdm(rounds, total=benchmark.rounds, desc=f"batch {batch}", unit="round"))


COLUMNS: Columns = (
    ("batch", "batch", ""),
    ("experts, rest", "model", ""),
    ("megabytes", "megabytes", ".0f"),
    ("ms", "ms", ".0f"),
    ("time / float32", "float32", ".2f"),
    ("time / bfloat16", "bfloat16", ".2f"),
)
