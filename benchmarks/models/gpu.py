"""The benchmark of a GPU: one layer next to the dense one and its peers, a training step of whole models, a
decoding step, and the updates of the optimizers.

The decoding step runs eagerly, compiled, and as a CUDA graph that is captured once and replayed. All must
decode the same tokens.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache, StaticCache, SwitchTransformersConfig
from transformers.optimization import Adafactor as TransformersAdafactor

from benchmarks.layer.layer import COLUMNS as LAYER_COLUMNS
from benchmarks.layer.layer import LayerBenchmark, layer_groups
from benchmarks.machine import describe_machine
from benchmarks.models.model import (
    ModelCase,
    build_models,
    build_ours,
    compared_columns,
    draw_tokens,
    measure_training,
    switch_config,
)
from benchmarks.report import Columns, Group, Row, measure_groups, rows_by_round
from benchmarks.timing import capture_graph, measure_in_turn, median_ratio
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
    "liger",
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
        json: File to save to after every round.
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


def run_gpu(benchmark: GpuBenchmark) -> None:
    """Measures, the most valuable first, prints the tables and saves them.

    Raises:
        ConfigError: When the file has results of other settings or another machine, and is incomplete.
    """
    layers = LayerBenchmark(
        cases=benchmark.cases,
        dtypes=["bfloat16"],
        passes=["forward", "forward_backward"],
        variants=benchmark.variants,
        rounds=benchmark.rounds,
        device=benchmark.device,
        json=None,
    )
    groups = layer_groups(layers)
    groups.append(Group({}, partial(measure_models, benchmark), "training"))
    groups.append(Group({}, partial(measure_optimizers, benchmark), "optimizers"))
    for batch in benchmark.batches:
        measure = partial(measure_decoding, benchmark, batch)
        groups.append(Group({"batch": batch}, measure, "decoding"))
    groups += layer_groups(dataclasses.replace(layers, dtypes=["float32"]))

    model = dataclasses.asdict(benchmark.case) | {"experts": benchmark.experts}
    settings = describe_machine(benchmark.device)
    settings |= {"rounds": benchmark.rounds, "model": model}
    tables = {
        "rows": LAYER_COLUMNS,
        "training": compared_columns,
        "optimizers": OPTIMIZER_COLUMNS,
        "decoding": DECODING_COLUMNS,
    }
    measure_groups(settings, groups, tables, benchmark.json)


# ---- training ----


def measure_models(benchmark: GpuBenchmark) -> Iterator[list[Row]]:
    """Yields a row for each model after every round: ours, transformers' Switch, and T5 in two forms."""
    models = build_models(benchmark.case, benchmark.experts, attentions=("eager", "sdpa"))
    models = {name: model.to(benchmark.device) for name, model in models.items()}
    return measure_training(benchmark.case, models, benchmark.rounds)


def measure_optimizers(benchmark: GpuBenchmark) -> Iterator[list[Row]]:
    """Yields a row for each optimizer after every round: an update of our model, after a first one.

    All update the same parameters in float32, each with its own state. transformers' Adafactor is the
    peer.
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

    def describe(times: Sequence[dict[str, float]]) -> list[Row]:
        rows: list[Row] = []
        for name in optimizers:
            ms = statistics.median(round_[name] for round_ in times)
            ratio = median_ratio(times, name, "adafactor")
            rows.append({"optimizer": name, "ms": ms, "ratio": ratio})
        return rows

    steps = {name: optimizer.step for name, optimizer in optimizers.items()}
    rounds = measure_in_turn(steps, {}, benchmark.rounds, benchmark.device)
    return rows_by_round(rounds, describe)


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
    graph = capture_graph(decoding.step, warm_up_runs=1)
    decoding.restore()
    return graph.replay


FORMS: dict[str, Callable[[Decoding], Step]] = {
    "eager": eager_step,
    "compiled": compiled_step,
    "cuda_graph": captured_step,
}


@torch.no_grad()
def measure_decoding(benchmark: GpuBenchmark, batch: int) -> Iterator[list[Row]]:
    """Yields a row for each form of the step after every round, for so many sequences."""
    config = switch_config(benchmark.case, benchmark.experts)
    model = build_model(config, benchmark.device)
    decoding = start_decoding(model, benchmark.case, batch, benchmark.device)

    # A form that fails gets a note in the table; tokens are compared with those of the eager step.
    steps: dict[str, Step] = {}
    forms: dict[str, Row] = {}
    expected: list[list[int]] = []
    for name in benchmark.forms:
        forms[name] = {"form": name, "note": ""}
        try:
            steps[name] = FORMS[name](decoding)
            tokens = decode(decoding, steps[name])
            expected = expected or tokens
            forms[name]["same_tokens"] = tokens == expected
        except RuntimeError as error:
            steps.pop(name, None)
            lines = str(error).splitlines() or [""]
            forms[name]["note"] = f"no: {lines[0]}"
        decoding.restore()

    def describe(times: Sequence[dict[str, float]]) -> list[Row]:
        rows: list[Row] = []
        for name, form in forms.items():
            numbers: Row = {}
            if name in steps:
                ms = statistics.median(round_[name] for round_ in times)
                numbers = {"ms": ms, "tokens_per_second": 1000 * batch / ms}
                numbers["ratio"] = median_ratio(times, name, "eager")
            rows.append(form | numbers)
        return rows

    clears = dict.fromkeys(steps, decoding.restore)
    rounds = measure_in_turn(steps, clears, benchmark.rounds, benchmark.device)
    yield from rows_by_round(rounds, describe)


def build_model(
    config: SwitchTransformersConfig, device: torch.device
) -> STMoEForConditionalGeneration:
    """Returns the model that decodes, in bfloat16."""
    model: Any = build_ours(config, torch.bfloat16)
    return model.to(device).eval()


def decode(decoding: Decoding, step: Step) -> list[list[int]]:
    """Returns the tokens of a few steps <int64>[steps, B] from the current position of the sequences."""
    tokens: list[list[int]] = []
    for _ in range(COMPARED_STEPS):
        step()
        tokens.append(decoding.ids.flatten().tolist())
    return tokens


def show_note(row: Row) -> str:
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
