"""Whole models: ours, transformers' Switch, and T5, in one table.

Measured are a step of training, one of fine-tuning, which has dropout, and greedy decoding.
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

from benchmarks.machine import Columns, describe_machine, format_report, print_report, save_report
from benchmarks.timing import measure_in_turn, median_ratio, ratio_range, ratio_text
from moe.convert.hf_config import from_hf_config
from moe.convert.hf_weights import hf_weight_map
from moe.errors import ConfigError
from moe.kernels.host_memory import keep_freed_memory
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration

Row = dict[str, Any]
"""A row of the saved table."""

PARTS = ("training", "generation", "fine_tuning")
FINE_TUNING_DROPOUT = 0.1


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
        report: Results so far.
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
        num_sparse = self.case.sparse_layers
        num_layers = self.case.num_layers
        if num_sparse < 1 or num_layers % num_sparse:
            fitting = [size for size in range(1, num_layers + 1) if num_layers % size == 0]
            raise ConfigError(
                f"--sparse-layers is {num_sparse}, which does not divide {num_layers} blocks; expected one of "
                f"{fitting}."
            )


def run_model(benchmark: ModelBenchmark) -> None:
    """Measures, prints the table and saves it; results are saved as they come in."""
    # As in training.
    keep_freed_memory()

    report = benchmark.report
    report.update(
        describe_machine(torch.device("cpu")),
        rounds=benchmark.rounds,
        case=dataclasses.asdict(benchmark.case),
        rows=[],
    )
    for rows in measure_parts(benchmark):
        report["rows"] += rows
        save_report(report, benchmark.json)

    print_report(format_report(report, compared_columns(report["rows"])), benchmark.json)


def measure_parts(benchmark: ModelBenchmark) -> Iterator[list[Row]]:
    """Yields the rows of one part after the other; models of one number of experts live at a time."""
    trains = "training" in benchmark.parts
    generates = "generation" in benchmark.parts

    # Training is measured with the first number of experts only.
    numbers = benchmark.experts if generates else benchmark.experts[:1]
    for index, num_experts in enumerate(numbers):
        models = build_models(benchmark.case, num_experts)
        if index == 0 and trains:
            yield measure_training(benchmark, models, num_experts)
        if generates:
            for batch in benchmark.batches:
                yield measure_generation(benchmark, models, num_experts, batch)
        models.clear()
        gc.collect()

    # Fine-tuning drops units, and so its models are others.
    if "fine_tuning" in benchmark.parts:
        num_experts = benchmark.experts[0]
        models = build_models(benchmark.case, num_experts, FINE_TUNING_DROPOUT)
        yield measure_training(benchmark, models, num_experts, "fine_tuning")


def build_models(
    case: ModelCase, experts: int, dropout_rate: float = 0.0
) -> dict[str, PreTrainedModel]:
    """Returns the models by name; transformers' Switch has the weights of ours, in the same memory.

    No token is dropped by either, so that all do the products of T5, whose attention is in both of
    its forms.
    """
    config = switch_config(case, experts, dropout_rate)

    # Ours and Switch share their weights.
    ours = build_ours(config)
    switch = build_switch(config, ours)
    models: dict[str, PreTrainedModel] = {"switch": switch, "ours": ours}
    for attention in ("eager", "sdpa"):
        config = T5Config(**_sizes(case, dropout_rate), feed_forward_proj="relu")
        config._attn_implementation = attention
        models[f"t5_{attention}"] = T5ForConditionalGeneration(config)
    return models


def _sizes(case: ModelCase, dropout_rate: float) -> dict[str, Any]:
    """Returns the sizes that all models share, under the names of transformers."""
    return {
        "vocab_size": case.vocab_size,
        "d_model": case.d_model,
        "d_ff": case.d_ff,
        "num_layers": case.num_layers,
        "num_decoder_layers": case.num_layers,
        "num_heads": case.num_heads,
        "dropout_rate": dropout_rate,
        "decoder_start_token_id": 0,
    }


def switch_config(
    case: ModelCase, experts: int, dropout_rate: float = 0.0
) -> SwitchTransformersConfig:
    """Returns the configuration of transformers' Switch, which drops no token."""
    return SwitchTransformersConfig(
        **_sizes(case, dropout_rate),
        num_experts=experts,
        num_sparse_encoder_layers=case.sparse_layers,
        num_sparse_decoder_layers=case.sparse_layers,
        expert_capacity=max(case.input_length, case.target_length),
    )


def build_ours(config: SwitchTransformersConfig) -> STMoEForConditionalGeneration:
    """Returns our model of the same sizes, which drops no token."""
    # Room for every token, as transformers' model gets it by its expert_capacity.
    fields = from_hf_config(config.to_diff_dict())
    fields |= {"expert_capacity": None, "capacity_factor": None, "eval_capacity_factor": None}
    torch.manual_seed(0)
    return STMoEForConditionalGeneration(STMoEConfig(**fields))


def build_switch(
    config: SwitchTransformersConfig, ours: STMoEForConditionalGeneration
) -> SwitchTransformersForConditionalGeneration:
    """Returns transformers' model over the weights of ours."""
    with torch.device("meta"):
        switch = SwitchTransformersForConditionalGeneration(config)

    # The names and splits under which transformers keeps them.
    our_weights = ours.state_dict()
    weights: dict[str, Tensor] = {}
    for weight in hf_weight_map(ours.config, "switch_transformers"):
        weights |= weight.split(our_weights[weight.name])

    # Not strict: a weight that is tied to another one is not among them.
    switch.load_state_dict(weights, strict=False, assign=True)
    switch.tie_weights()
    return switch


def measure_training(
    benchmark: ModelBenchmark,
    models: Mapping[str, PreTrainedModel],
    experts: int,
    part: str = "training",
) -> list[Row]:
    """Returns a row for each model: forward with its own losses, and backward, without an update.

    On a GPU under autocast in bfloat16.
    """
    case = benchmark.case
    device = device_of(models)
    inputs = draw_tokens(case, case.batch, case.input_length).to(device)
    labels = draw_tokens(case, case.batch, case.target_length).to(device)
    mask = torch.ones_like(inputs)

    def step(model: PreTrainedModel) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=inputs, attention_mask=mask, labels=labels).loss
        loss.backward()

    # All models in training mode, in turn.
    runs: dict[str, Callable[[], object]] = {}
    for name, model in models.items():
        runs[name] = partial(step, model.train())
    times = measure_models(benchmark, runs, models, f"{part}, {experts} experts")

    tokens = case.batch * (case.input_length + case.target_length)
    keys = {"part": part, "experts": experts, "batch": case.batch}
    return describe_rows(times, tokens, keys)


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
    # Generate exactly this many tokens, even after an end token.
    length = {
        "min_new_tokens": case.new_tokens,
        "max_new_tokens": case.new_tokens,
        "do_sample": False,
    }

    def decode(model: Any) -> Tensor:
        return model.generate(inputs, attention_mask=mask, **length)

    def encode(model: Any) -> object:
        return model.get_encoder()(input_ids=inputs, attention_mask=mask)

    # Greedy decoding with the encoder, and the encoder alone.
    decode_runs: dict[str, Callable[[], object]] = {}
    encode_runs: dict[str, Callable[[], object]] = {}
    for name, model in models.items():
        if isinstance(model, GenerationMixin):
            decode_runs[name] = partial(decode, model.eval())
            encode_runs[name] = partial(encode, model)

    where = f"generation, {experts} experts, batch {batch}"
    if not torch.equal(decode(models["ours"]), decode(models["switch"])):
        print(
            f"{where}: tokens differ between ours and switch, which can happen where two logits tie"
        )
    whole_times = measure_models(benchmark, decode_runs, models, where)
    encoder_times = measure_models(benchmark, encode_runs, models, where)

    # The decoder's time is the rest after the encoder's, in the same round.
    decoder_times: list[dict[str, float]] = []
    for whole, encoder in zip(whole_times, encoder_times, strict=True):
        decoder_times.append({name: whole[name] - encoder[name] for name in whole})

    tokens = batch * case.new_tokens
    keys = {"part": "generation", "experts": experts, "batch": batch}
    decoder_keys = {**keys, "part": "decoder alone"}
    rows = describe_rows(whole_times, tokens, keys)
    return rows + describe_rows(decoder_times, tokens, decoder_keys)


def measure_models(
    benchmark: ModelBenchmark,
    runs: Mapping[str, Callable[[], object]],
    models: Mapping[str, PreTrainedModel],
    where: str,
) -> list[dict[str, float]]:
    """Returns the milliseconds of each model, round by round."""
    clears = {name: partial(models[name].zero_grad, set_to_none=True) for name in runs}
    rounds = measure_in_turn(runs, clears, benchmark.rounds, device_of(models))
    return list(tqdm(rounds, total=benchmark.rounds, desc=where, unit="round"))


def device_of(models: Mapping[str, PreTrainedModel]) -> torch.device:
    """Returns the device that all models are on."""
    return next(iter(models.values())).device


def describe_rows(times: Sequence[Mapping[str, float]], tokens: int, keys: Row) -> list[Row]:
    """Returns a row for each model: milliseconds, tokens per second, and its time over every other's."""
    # Times of the same round are compared.
    names = list(times[0])
    rows: list[Row] = []
    for name in names:
        ms = statistics.median(round_[name] for round_ in times)
        rows.append(
            {
                **keys,
                "model": name,
                "ms": ms,
                "tokens_per_second": 1000 * tokens / ms,
                "over": {other: median_ratio(times, name, other) for other in names},
                "over_range": {other: ratio_range(times, name, other) for other in names},
            }
        )
    return rows


def draw_tokens(case: ModelCase, batch: int, length: int) -> Tensor:
    """Returns token ids <int64>[batch, length]."""
    generator = torch.Generator().manual_seed(batch * length)
    return torch.randint(2, case.vocab_size, (batch, length), generator=generator)


COLUMNS: Columns = (
    ("part", "part", ""),
    ("experts", "experts", ""),
    ("batch", "batch", ""),
    ("model", "model", ""),
    ("ms", "ms", ".0f"),
    ("tokens/s", "tokens_per_second", ".1f"),
)


def compared_columns(rows: Sequence[Row]) -> Columns:
    """Returns the columns of `rows`, with times over those of every other model."""

    def over(row: Row, name: str) -> str:
        return ratio_text(row["over"][name], row["over_range"][name])

    names = list(rows[0]["over"])
    return [*COLUMNS, *((f"time / {name}", partial(over, name=name), "") for name in names)]
