"""Cost of recording, replaying and editing routing, relative to an evaluation of the same batches.

Rounds are interleaved; results are medians of the ratio to the evaluation in the same round.
"""

import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.machine import Columns, describe_machine, print_report, report_text, save_report
from benchmarks.timing import measure_in_turn, median_ratio
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.sparse.editing import edit_routing, sparse_layers
from moe.sparse.plan import DispatchPlan, RouterScores
from moe.tracing.recorder import TracedBatch, record_routing, traced_batches
from moe.tracing.replay import replay_routing
from moe.tracing.trace_file import TENSORS_FILE, save_trace

BASE = "evaluate"
_SEED = 0


@dataclass(frozen=True)
class TracingBenchmark:
    """Measured functions.

    Attributes:
        rounds: Results are medians over so many.
        json: File to save the table to; None for none.
        d_model: Width of the model; its other sizes follow.
        num_layers: Blocks of each stack, every second one sparse.
        num_experts: Experts of a layer.
        num_batches: Batches of an evaluation.
        batch_size: Sequences of a batch.
        inputs_length: Encoder tokens of a sequence.
        targets_length: Decoder tokens of a sequence.
        vocab_size: Tokens of the vocabulary.
    """

    rounds: int
    json: Path | None = None
    d_model: int = 128
    num_layers: int = 4
    num_experts: int = 8
    num_batches: int = 4
    batch_size: int = 32
    inputs_length: int = 64
    targets_length: int = 16
    vocab_size: int = 2048


def run_tracing(benchmark: TracingBenchmark) -> dict[str, Any]:
    """Measures, prints a table, and returns and saves the report."""
    device = torch.device("cpu")
    model = _build_model(benchmark)
    batches = _draw_batches(benchmark)
    runs = _runs(model, batches)
    rounds = measure_in_turn(runs, {}, benchmark.rounds, device)
    times = list(tqdm(rounds, total=benchmark.rounds, desc="tracing"))

    # A row for each way to read the batches.
    rows = []
    for name in runs:
        rows.append(
            {
                "run": name,
                "milliseconds": statistics.median(round_[name] for round_ in times),
                "ratio": median_ratio(times, name, BASE),
            }
        )
    report = {
        **describe_machine(device),
        "rounds": benchmark.rounds,
        "tokens": _num_tokens(batches),
        "sparse_layers": len(sparse_layers(model)),
        "megabytes_per_million_tokens": _megabytes(model, batches),
        "rows": rows,
    }
    save_report(report, benchmark.json)
    print_report(format_report(report), benchmark.json)
    return report


def _build_model(benchmark: TracingBenchmark) -> STMoEForConditionalGeneration:
    # Every second block is sparse, and no token is dropped.
    torch.manual_seed(_SEED)
    num_sparse = benchmark.num_layers // 2
    config = STMoEConfig(
        vocab_size=benchmark.vocab_size,
        d_model=benchmark.d_model,
        d_kv=32,
        d_ff=2 * benchmark.d_model,
        num_heads=benchmark.d_model // 32,
        num_layers=benchmark.num_layers,
        num_decoder_layers=benchmark.num_layers,
        num_experts=benchmark.num_experts,
        num_sparse_encoder_layers=num_sparse,
        num_sparse_decoder_layers=num_sparse,
        eval_capacity_factor=None,
    )
    return STMoEForConditionalGeneration(config).eval()


def _draw_batches(benchmark: TracingBenchmark) -> list[TracedBatch]:
    generator = torch.Generator().manual_seed(_SEED)

    def draw(length: int) -> torch.Tensor:
        size = (benchmark.batch_size, length)
        return torch.randint(3, benchmark.vocab_size, size, generator=generator)

    batches = []
    for _ in range(benchmark.num_batches):
        input_ids = draw(benchmark.inputs_length)
        labels = draw(benchmark.targets_length)
        mask = torch.ones_like(input_ids)
        batches.append({"input_ids": input_ids, "attention_mask": mask, "labels": labels})
    return list(traced_batches(batches))


def _runs(
    model: STMoEForConditionalGeneration, batches: list[TracedBatch]
) -> dict[str, Callable[[], object]]:
    """Returns the measured functions, by name."""
    # Build the inputs of replay and edit once.
    trace = record_routing(model, batches)
    edits = {key: _same_plan for key in sparse_layers(model)}

    def edit() -> None:
        with edit_routing(model, edits):
            _evaluate(model, batches)

    def replay() -> None:
        with replay_routing(model, trace):
            _evaluate(model, batches)

    return {
        BASE: partial(_evaluate, model, batches),
        "record": partial(record_routing, model, batches),
        "record, 4 best": partial(record_routing, model, batches, num_best=4),
        "edit that changes nothing": edit,
        "replay": replay,
    }


@torch.no_grad()
def _evaluate(model: STMoEForConditionalGeneration, batches: list[TracedBatch]) -> None:
    """Runs the model with its loss, and keeps nothing."""
    for traced in batches:
        model(**traced.batch, use_cache=False)


def _same_plan(scores: RouterScores, plan: DispatchPlan) -> DispatchPlan:
    return plan


def _num_tokens(batches: list[TracedBatch]) -> int:
    num_tokens = 0
    for traced in batches:
        num_tokens += traced.batch["input_ids"].numel() + traced.batch["labels"].numel()
    return num_tokens


def _megabytes(model: STMoEForConditionalGeneration, batches: list[TracedBatch]) -> float:
    """Returns the size of a trace on disk for a million tokens and one sparse layer of each stack."""
    # The first layer of each stack alone.
    trace = record_routing(model, batches)
    one_layer = trace._replace(
        facts=trace.facts._replace(
            layers=[layer for layer in trace.facts.layers if layer.layer == 0]
        ),
        encoder=trace.encoder._replace(layers=trace.encoder.layers[:1]),
        decoder=trace.decoder._replace(layers=trace.decoder.layers[:1]),
    )
    with tempfile.TemporaryDirectory() as folder:
        save_trace(one_layer, Path(folder) / "trace")
        size = (Path(folder) / "trace" / TENSORS_FILE).stat().st_size
    return size / _num_tokens(batches)


COLUMNS: Columns = (
    ("what", "run", ""),
    ("ms", "milliseconds", ".1f"),
    ("of an evaluation", "ratio", ".2f"),
)


def format_report(report: Mapping[str, Any]) -> str:
    """Returns the report as text."""
    table = report_text(report, f"{report['threads']} threads", COLUMNS)
    return (
        f"{table}\n\n"
        f"{report['tokens']:,} tokens through {report['sparse_layers']} sparse layers. A million "
        "tokens of a trace with a sparse layer in each stack: "
        f"{report['megabytes_per_million_tokens']:.1f} MB."
    )
