"""The benchmark of a GPU: one layer next to the dense one and its peers, a training step of whole models, a
decoding step, and the updates of the optimizers.

The decoding step runs eagerly, compiled, and as a CUDA graph that is captured once and replayed. All must
decode the same tokens. A run that is interrupted continues after the last part that it saved.
"""

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import EncoderDecoderCache, StaticCache, SwitchTransformersConfig
from transformers.optimization import Adafactor as TransformersAdafactor

from benchmarks.layer.layer import COLUMNS as LAYER_COLUMNS
from benchmarks.layer.layer import LayerBenchmark, describe_run, measure_cases
from benchmarks.machine import Columns, format_report, print_report, report_table, save_report
from benchmarks.models.model import (
    ModelBenchmark,
    ModelCase,
    build_models,
    build_ours,
    compared_columns,
    draw_tokens,
    measure_training,
    switch_config,
)
from benchmarks.timing import measure_in_turn, median_ratio
from moe.errors import ConfigError
from moe.models.modeling import STMoEForConditionalGeneration
from moe.optim.optimizers import OPTIMIZERS
from moe.optim.parameter_groups import parameter_groups

VARIANTS = (
    "dense",
    "moe_dropless",
    "moe_unreported",
    "moe_compiled",
    "moe_static",
    "hf_grouped_mm",
    "hf_switch",
    "st_moe_pytorch",
)
COMPARED_STEPS = 16

Step = Callable[[], object]
"""Decodes one token of each sequence."""


@dataclass(frozen=True)
class GpuBenchmark:
    """What to measure; the fields are the command's options.

    Attributes:
        cases: Keys of `CASES`.
        batches: Sequences to decode at once.
        experts: Experts of each sparse layer of the model that decodes.
        rounds: How often everything is measured; results are medians.
        device: Where.
        json: File for the results, which are in `partial` until all are there.
        case: Sizes of that model.
        variants: Layers to measure.
        forms: Of `FORMS`, `eager` first.
    """

    cases: Sequence[int]
    batches: Sequence[int]
    experts: int
    rounds: int
    device: torch.device
    json: Path
    case: ModelCase = field(default_factory=ModelCase)
    variants: Sequence[str] = VARIANTS
    forms: Sequence[str] = ("eager", "compiled", "cuda_graph")

    @property
    def partial(self) -> Path:
        """File of the parts that are complete."""
        return self.json.with_suffix(".part.json")


def run_gpu(benchmark: GpuBenchmark) -> None:
    """Measures what is not yet saved, the most valuable first, and prints the tables.

    Raises:
        ConfigError: When the saved parts come from other settings or another machine.
    """
    layer = LayerBenchmark(
        cases=benchmark.cases,
        dtypes=["bfloat16"],
        passes=["forward", "forward_backward"],
        variants=benchmark.variants,
        rounds=benchmark.rounds,
        device=benchmark.device,
        json=benchmark.partial,
    )
    sizes = dataclasses.asdict(benchmark.case) | {"experts": benchmark.experts}
    layer.report.update(_saved_parts(benchmark, {**describe_run(layer), "model": sizes}))
    report = layer.report
    save_report(report, benchmark.partial)

    # Layers in bfloat16, then whole models, then layers in float32.
    measure_cases(layer)
    for name, measure_part in (("training", measure_models), ("optimizers", measure_optimizers)):
        if name not in report:
            report[name] = measure_part(benchmark)
            save_report(report, benchmark.partial)
    report.setdefault("decoding", [])
    for batch in benchmark.batches:
        if not any(row["batch"] == batch for row in report["decoding"]):
            report["decoding"] += measure_decoding(benchmark, batch)
            save_report(report, benchmark.partial)
    measure_cases(dataclasses.replace(layer, dtypes=["float32"]))

    benchmark.partial.replace(benchmark.json)
    tables = (
        format_report(report, LAYER_COLUMNS),
        report_table(compared_columns(report["training"]), report["training"]),
        report_table(OPTIMIZER_COLUMNS, report["optimizers"]),
        report_table(DECODING_COLUMNS, report["decoding"]),
    )
    print_report("\n\n".join(tables), benchmark.json)


def _saved_parts(benchmark: GpuBenchmark, start: dict[str, Any]) -> dict[str, Any]:
    """Returns the start of a report, with the parts of it that an interrupted run saved."""
    if not benchmark.partial.exists():
        return start
    saved = json.loads(benchmark.partial.read_text(encoding="utf-8"))
    for name in ("device", "threads", "torch", "rounds", "model"):
        if saved.get(name) != start[name]:
            raise ConfigError(
                f"{benchmark.partial} has {name} {saved.get(name)}, but this run has {start[name]}. Delete it, or "
                "choose another --json."
            )
    return saved


# ---- training ----


def measure_models(benchmark: GpuBenchmark) -> list[dict[str, Any]]:
    """Returns a row for each model: ours, transformers' Switch, and T5 in both forms of attention."""
    models: dict[str, Any] = build_models(benchmark.case, benchmark.experts)
    models = {name: model.to(benchmark.device) for name, model in models.items()}
    case = ModelBenchmark(
        parts=["training"],
        experts=[benchmark.experts],
        batches=[],
        rounds=benchmark.rounds,
        json=None,
        case=benchmark.case,
    )
    return measure_training(case, models, benchmark.experts)


def measure_optimizers(benchmark: GpuBenchmark) -> list[dict[str, Any]]:
    """Returns a row for each optimizer: one update of our model in float32, after a first one.

    All update the same parameters, each with its own state. transformers' Adafactor is the peer.
    """
    model: Any = build_ours(switch_config(benchmark.case, benchmark.experts))
    model.to(benchmark.device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter).mul_(1e-3)

    optimizers: dict[str, torch.optim.Optimizer] = {}
    for name in OPTIMIZERS.names():
        spec = OPTIMIZERS.get(name)
        groups = parameter_groups(model)
        optimizers[name] = spec.build(groups, clipping_threshold=1.0, weight_decay=0.0)
    peer = TransformersAdafactor(model.parameters(), lr=1e-6, relative_step=False)
    optimizers["transformers' adafactor"] = peer

    # The rate keeps the weights as they are.
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = 1e-6
    steps = {name: optimizer.step for name, optimizer in optimizers.items()}
    rounds = measure_in_turn(steps, {}, benchmark.rounds, benchmark.device)
    times = list(tqdm(rounds, total=benchmark.rounds, desc="optimizers", unit="round"))

    rows: list[dict[str, Any]] = []
    for name in optimizers:
        ms = statistics.median(round_[name] for round_ in times)
        ratio = median_ratio(times, name, "adafactor")
        rows.append({"optimizer": name, "ms": ms, "ratio": ratio})
    return rows


OPTIMIZER_COLUMNS: Columns = (
    ("optimizer", "optimizer", ""),
    ("ms", "ms", ".2f"),
    ("time / adafactor", "ratio", ".2f"),
)


# ---- the step of decoding ----


@dataclass
class Decoding:
    """Sequences that are being decoded, in memory that stays from step to step.

    Attributes:
        model: In evaluation mode.
        ids: <int64>[B, 1] the last token of each sequence.
        given: The other arguments of a step.
        saved: Tensors that `restore` puts back.
    """

    model: STMoEForConditionalGeneration
    ids: Tensor
    given: dict[str, Any]
    saved: list[Tensor] = field(default_factory=list)

    def step(self, model: Callable[..., Any] | None = None) -> None:
        """Decodes the next token of each sequence, by another form of the model where one is given."""
        run = self.model if model is None else model
        output = run(decoder_input_ids=self.ids, output_router_logits=False, **self.given)
        self.ids.copy_(output.logits[:, -1:].argmax(-1))

    def save(self) -> None:
        """Saves the current position of the sequences."""
        self.saved = [tensor.clone() for tensor in self._state()]

    def restore(self) -> None:
        """Resets the sequences to the saved position."""
        for tensor, value in zip(self._state(), self.saved, strict=True):
            tensor.copy_(value)

    def _state(self) -> Iterator[Tensor]:
        """Yields what a step changes; except the encoder's part of the cache."""
        yield self.ids
        for layer in self.given["past_key_values"].self_attention_cache.layers:
            yield layer.keys
            yield layer.values
            yield layer.cumulative_length


@torch.no_grad()
def start_decoding(
    model: STMoEForConditionalGeneration, case: ModelCase, batch: int, device: torch.device
) -> Decoding:
    """Returns sequences after their first step, which fills the cross-attention."""
    inputs = draw_tokens(case, batch, case.input_length).to(device)
    mask = torch.ones_like(inputs)
    lengths = (COMPARED_STEPS + 2, case.input_length)
    caches = [StaticCache(config=model.config, max_cache_len=length) for length in lengths]
    given = {
        "attention_mask": mask,
        "past_key_values": EncoderDecoderCache(*caches),
        "encoder_outputs": model.get_encoder()(inputs, attention_mask=mask),
    }

    start = model.config.decoder_start_token_id
    ids = torch.full((batch, 1), start, dtype=torch.int64, device=device)
    decoding = Decoding(model, ids, given)
    decoding.step()
    decoding.save()
    return decoding


def eager_step(decoding: Decoding) -> Step:
    """Returns the step as Python runs it."""
    return decoding.step


def compiled_step(decoding: Decoding) -> Step:
    """Returns the step with a model that torch.compile made one graph of."""
    model = torch.compile(decoding.model, fullgraph=True)
    return lambda: decoding.step(model)


def captured_step(decoding: Decoding) -> Step:
    """Returns the replay of a step that was captured into a CUDA graph."""
    # Warm up on a side stream, as torch requires.
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        decoding.step()
    torch.cuda.current_stream().wait_stream(side_stream)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoding.step()
    decoding.restore()
    return graph.replay


FORMS: dict[str, Callable[[Decoding], Step]] = {
    "eager": eager_step,
    "compiled": compiled_step,
    "cuda_graph": captured_step,
}


@torch.no_grad()
def measure_decoding(benchmark: GpuBenchmark, batch: int) -> list[dict[str, Any]]:
    """Returns a row for each form of the step, for so many sequences."""
    config = switch_config(benchmark.case, benchmark.experts)
    model = build_model(config, benchmark.device)
    decoding = start_decoding(model, benchmark.case, batch, benchmark.device)

    # A form that fails gets a note in the table.
    steps: dict[str, Step] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in benchmark.forms:
        rows[name] = {"batch": batch, "form": name, "note": ""}
        try:
            steps[name] = FORMS[name](decoding)
            rows[name]["tokens"] = decode(decoding, steps[name])
        except RuntimeError as error:
            steps.pop(name, None)
            lines = str(error).splitlines() or [""]
            rows[name]["note"] = f"no: {lines[0]}"
        decoding.restore()

    clears = dict.fromkeys(steps, decoding.restore)
    rounds = measure_in_turn(steps, clears, benchmark.rounds, benchmark.device)
    description = f"decoding, batch {batch}"
    times = list(tqdm(rounds, total=benchmark.rounds, desc=description, unit="round"))

    # Times are compared within a round, and tokens with the tokens of the eager step.
    expected = rows["eager"].get("tokens")
    for name in steps:
        ms = statistics.median(round_[name] for round_ in times)
        rows[name]["ms"] = ms
        rows[name]["tokens_per_second"] = 1000 * batch / ms
        rows[name]["ratio"] = median_ratio(times, name, "eager")
        rows[name]["same_tokens"] = rows[name].pop("tokens") == expected
    return list(rows.values())


def build_model(
    config: SwitchTransformersConfig, device: torch.device
) -> STMoEForConditionalGeneration:
    """Returns the model that decodes, in bfloat16."""
    model: Any = build_ours(config)  # whose `to` is wrapped by transformers
    return model.to(device, torch.bfloat16).eval()


def decode(decoding: Decoding, step: Step) -> list[list[int]]:
    """Returns the tokens of a few steps <int64>[steps, B] from the current position of the sequences."""
    tokens: list[list[int]] = []
    for _ in range(COMPARED_STEPS):
        step()
        tokens.append(decoding.ids.flatten().tolist())
    return tokens


def show_note(row: dict[str, Any]) -> str:
    """Returns the note on a form of the step."""
    return row["note"] if row.get("same_tokens", True) else "other tokens than eager"


DECODING_COLUMNS: Columns = (
    ("batch", "batch", ""),
    ("step", "form", ""),
    ("ms", "ms", ".2f"),
    ("tokens/s", "tokens_per_second", ".0f"),
    ("time / eager", "ratio", ".2f"),
    ("note", show_note, ""),
)
