"""Whole models: a training step and greedy decoding of ours, of transformers' Switch and of T5, in
one table.
"""

import dataclasses
import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import (
    GenerationMixin,
    PreTrainedModel,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from benchmarks.machine import describe_machine, save_report
from benchmarks.timing import measure_in_turn, median_ratio
from moe.convert.hf_config import from_hf_config
from moe.convert.hf_names import hf_weight_map
from moe.errors import ConfigError
from moe.inspection.tables import format_table
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration

Row = dict[str, Any]

PARTS = ("training", "generation")


@dataclass(frozen=True)
class ModelCase:
    """Sizes: those of google/switch-base-8, whose backbone is T5-base's.

    Attributes:
        vocab_size: V.
        d_model: D.
        d_ff: F, of dense layers and of each expert.
        num_heads: H, of 64 numbers each.
        num_layers: Blocks of the encoder and of the decoder.
        sparse_layers: Sparse ones of them, in each.
        batch: Sequences of a training step.
        input_length: Tokens of the encoder.
        target_length: Tokens of the decoder in training.
        new_tokens: Tokens to decode.
    """

    vocab_size: int = 32128
    d_model: int = 768
    d_ff: int = 3072
    num_heads: int = 12
    num_layers: int = 12
    sparse_layers: int = 6
    batch: int = 8
    input_length: int = 512
    target_length: int = 114
    new_tokens: int = 48


@dataclass(frozen=True)
class ModelBenchmark:
    """What to measure; the fields are the command's options.

    Attributes:
        parts: Of `PARTS`.
        experts: Numbers of experts to decode with; training takes the first.
        batches: Sequences to decode at once.
        rounds: How often everything is measured; results are medians.
        json: File to save to after every part; None for none.
        case: Sizes.
        report: What has been measured.
    """

    parts: Sequence[str]
    experts: Sequence[int]
    batches: Sequence[int]
    rounds: int
    json: Path | None
    case: ModelCase = ModelCase()
    report: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks what argparse cannot.

        Raises:
            ConfigError: When sparse layers do not divide the blocks.
        """
        layers, most = self.case.sparse_layers, self.case.num_layers
        if layers < 1 or most % layers:
            fitting = [number for number in range(1, most + 1) if most % number == 0]
            raise ConfigError(
                f"--sparse-layers is {layers}, which does not divide {most} blocks; expected one of {fitting}."
            )


def run_model(benchmark: ModelBenchmark) -> None:
    """Measures, prints the table and saves it; what is measured is saved as it goes."""
    report = benchmark.report
    sizes = dataclasses.asdict(benchmark.case)
    report.update(
        describe_machine(torch.device("cpu")), rounds=benchmark.rounds, case=sizes, rows=[]
    )
    for rows in measure_parts(benchmark):
        report["rows"] += rows
        save_report(report, benchmark.json)
    print(format_report(report))
    if benchmark.json:
        print(f"The table is in {benchmark.json}.")


def measure_parts(benchmark: ModelBenchmark) -> Iterator[list[Row]]:
    """Yields the rows of one part after the other; models of one number of experts live at a time."""
    case = benchmark.case
    decodes = "generation" in benchmark.parts
    for index, experts in enumerate(benchmark.experts if decodes else benchmark.experts[:1]):
        models = build_models(case, experts)
        if index == 0 and "training" in benchmark.parts:
            yield measure_training(benchmark, models, experts)
        if decodes:
            for batch in benchmark.batches:
                yield measure_generation(benchmark, models, experts, batch)
        models.clear()
        gc.collect()


def build_models(case: ModelCase, experts: int) -> dict[str, PreTrainedModel]:
    """Returns the models by name; transformers' Switch has the weights of ours, in the same memory.

    No token is dropped by either, so that all do the products of T5, whose attention is in both of
    its forms.
    """
    sizes: dict[str, Any] = {
        "vocab_size": case.vocab_size,
        "d_model": case.d_model,
        "d_ff": case.d_ff,
        "num_layers": case.num_layers,
        "num_decoder_layers": case.num_layers,
        "num_heads": case.num_heads,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    }
    config = SwitchTransformersConfig(
        **sizes,
        num_experts=experts,
        num_sparse_encoder_layers=case.sparse_layers,
        num_sparse_decoder_layers=case.sparse_layers,
        expert_capacity=max(case.input_length, case.target_length),
    )
    torch.manual_seed(0)
    dropless = {"expert_capacity": None, "capacity_factor": None, "eval_capacity_factor": None}
    ours = STMoEForConditionalGeneration(
        STMoEConfig(**{**from_hf_config(config.to_diff_dict()), **dropless})
    )
    with torch.device("meta"):
        switch = SwitchTransformersForConditionalGeneration(config)
    weights, parts = ours.state_dict(), {}
    for weight in hf_weight_map(ours.config, "switch_transformers"):
        parts |= weight.split(weights[weight.name])
    switch.load_state_dict(
        parts, strict=False, assign=True
    )  # what is tied to another weight has no part
    switch.tie_weights()
    models: dict[str, PreTrainedModel] = {"switch": switch, "ours": ours}
    for attention in ("eager", "sdpa"):
        config = T5Config(**sizes, feed_forward_proj="relu")
        config._attn_implementation = attention
        models[f"t5_{attention}"] = T5ForConditionalGeneration(config)
    return models


def measure_training(
    benchmark: ModelBenchmark, models: Mapping[str, PreTrainedModel], experts: int
) -> list[Row]:
    """Returns a row for each model: forward with the losses it has by itself and backward, without
    an update.
    """
    case = benchmark.case
    inputs = draw_tokens(case, case.batch, case.input_length)
    labels = draw_tokens(case, case.batch, case.target_length)
    mask = torch.ones_like(inputs)

    def step(model: PreTrainedModel) -> Callable[[], object]:
        return lambda: model(input_ids=inputs, attention_mask=mask, labels=labels).loss.backward()

    for model in models.values():
        model.train()
    runs = {name: step(model) for name, model in models.items()}
    times = measure_models(benchmark, runs, models, f"training, {experts} experts")
    tokens = case.batch * (case.input_length + case.target_length)
    return describe_rows(
        times, tokens, {"part": "training", "experts": experts, "batch": case.batch}
    )


@torch.no_grad()
def measure_generation(
    benchmark: ModelBenchmark, models: Mapping[str, PreTrainedModel], experts: int, batch: int
) -> list[Row]:
    """Returns a row for each model, with encoder and without it: greedy decoding with the cache.

    Ours and Switch, which have the same weights, must decode the same tokens; if they do not, a
    line says so.
    """
    case = benchmark.case
    inputs = draw_tokens(case, batch, case.input_length)
    mask = torch.ones_like(inputs)
    length = {
        "min_new_tokens": case.new_tokens,
        "max_new_tokens": case.new_tokens,
        "do_sample": False,
    }

    def decode(model: Any) -> Callable[[], Tensor]:
        return lambda: model.generate(inputs, attention_mask=mask, **length)

    def encode(model: Any) -> Callable[[], object]:
        return lambda: model.get_encoder()(input_ids=inputs, attention_mask=mask)

    decoders = {
        name: model.eval() for name, model in models.items() if isinstance(model, GenerationMixin)
    }
    where = f"generation, {experts} experts, batch {batch}"
    if not torch.equal(decode(decoders["ours"])(), decode(decoders["switch"])()):
        print(
            f"{where}: tokens differ between ours and switch, which can happen where two logits tie"
        )
    keys = {"part": "generation", "experts": experts, "batch": batch}
    whole = measure_models(
        benchmark, {name: decode(model) for name, model in decoders.items()}, models, where
    )
    encoder = measure_models(
        benchmark, {name: encode(model) for name, model in decoders.items()}, models, where
    )
    steps = [
        {name: both[name] - part[name] for name in both}
        for both, part in zip(whole, encoder, strict=True)
    ]
    tokens = batch * case.new_tokens
    return describe_rows(whole, tokens, keys) + describe_rows(
        steps, tokens, {**keys, "part": "decoder alone"}
    )


def measure_models(
    benchmark: ModelBenchmark,
    runs: Mapping[str, Callable[[], object]],
    models: Mapping[str, PreTrainedModel],
    where: str,
) -> list[dict[str, float]]:
    """Returns the milliseconds of each model, round by round."""
    clears = {name: partial(models[name].zero_grad, set_to_none=True) for name in runs}
    rounds = measure_in_turn(runs, clears, benchmark.rounds, torch.device("cpu"))
    return list(tqdm(rounds, total=benchmark.rounds, desc=where, unit="round"))


def describe_rows(times: Sequence[Mapping[str, float]], tokens: int, keys: Row) -> list[Row]:
    """Returns a row for each model: milliseconds, tokens per second, and its time over that of
    every other.
    """
    return [
        keys
        | {
            "model": name,
            "ms": (ms := statistics.median(round_[name] for round_ in times)),
            "tokens_per_second": 1000 * tokens / ms,
            "over": {other: median_ratio(times, name, other) for other in times[0]},
        }
        for name in times[0]
    ]


def draw_tokens(case: ModelCase, batch: int, length: int) -> Tensor:
    """Returns token ids <int64>[batch, length]."""
    generator = torch.Generator().manual_seed(batch * length)
    return torch.randint(2, case.vocab_size, (batch, length), generator=generator)


def format_report(report: Mapping[str, Any]) -> str:
    """Returns the report as text."""
    machine = f"{report['device']}, {report['threads']} threads, torch {report['torch']}, {report['rounds']} rounds"
    names = list(report["rows"][0]["over"])
    header = (
        "part",
        "experts",
        "batch",
        "model",
        "ms",
        "tokens/s",
        *(f"time / {name}" for name in names),
    )
    cells = [
        [
            *(str(row[key]) for key in ("part", "experts", "batch", "model")),
            f"{row['ms']:.0f}",
            f"{row['tokens_per_second']:.1f}",
            *(f"{row['over'][name]:.2f}" for name in names),
        ]
        for row in report["rows"]
    ]
    return f"{machine}\n\n{format_table(header, cells)}"
