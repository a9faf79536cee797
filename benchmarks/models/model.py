"""Whole models: ours, transformers' Switch, and T5, in one table.

Measured are a step of training, and one of fine-tuning, which has dropout; decoding.py has the rest.
"""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from benchmarks.machine import describe_machine
from benchmarks.report import Columns, Group, Row, measure_groups, rows_by_round
from benchmarks.timing import measure_in_turn, median_ratio, ratio_range, ratio_text
from moe.convert.hf_config import from_hf_config
from moe.convert.hf_weights import hf_weight_map
from moe.errors import ConfigError
from moe.kernels.host_memory import keep_freed_memory
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration

PARTS = {"training": 0.0, "fine_tuning": 0.1}
"""Rates of dropout."""


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

    def __post_init__(self) -> None:
        """Checks what argparse cannot.

        Raises:
            ConfigError: When sparse layers do not divide the blocks.
        """
        num_sparse = self.sparse_layers
        if num_sparse < 1 or self.num_layers % num_sparse:
            fitting = [
                size for size in range(1, self.num_layers + 1) if self.num_layers % size == 0
            ]
            raise ConfigError(
                f"--sparse-layers is {num_sparse}, which does not divide {self.num_layers} blocks; expected one of "
                f"{fitting}."
            )


def run_model(
    parts: Sequence[str], experts: Sequence[int], rounds: int, json: Path | None, case: ModelCase
) -> None:
    """Measures, prints the table and saves it.

    Args:
        parts: Of `PARTS`.
        experts: Numbers of experts.
        rounds: How often everything is measured; results are medians.
        json: File to save to after every round; None for none.
        case: Sizes.
    """
    # As in training.
    keep_freed_memory()

    def measure(part: str, num_experts: int) -> Iterator[list[Row]]:
        models = build_models(case, num_experts, dropout_rate=PARTS[part])
        return measure_training(case, models, rounds)

    settings = describe_machine(torch.device("cpu"))
    settings |= {"rounds": rounds, "case": dataclasses.asdict(case)}
    groups: list[Group] = []
    for part, num_experts in product(parts, experts):
        keys = {"part": part, "experts": num_experts, "batch": case.batch}
        groups.append(Group(keys, partial(measure, part, num_experts)))
    measure_groups(settings, groups, {"rows": compared_columns}, json)


def build_models(
    case: ModelCase,
    experts: int,
    *,
    dropout_rate: float = 0.0,
    dtype: torch.dtype = torch.float32,
    attentions: Sequence[str] = ("sdpa",),
) -> dict[str, Any]:
    """Returns the models by name; transformers' Switch has the weights of ours, in the same memory.

    No token is dropped by either, so that all do the products of T5, of which there is one for each
    form of attention.
    """
    config = switch_config(case, experts, dropout_rate)

    # Ours and Switch share their weights.
    ours = build_ours(config, dtype)
    models: dict[str, Any] = {"switch": build_switch(config, ours), "ours": ours}
    for attention in attentions:
        config = T5Config(**_sizes(case, dropout_rate), feed_forward_proj="relu")
        config._attn_implementation = attention
        t5: Any = T5ForConditionalGeneration(config)  # whose `to` is wrapped by transformers
        models[f"t5_{attention}"] = t5.to(dtype)
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


def build_ours(
    config: SwitchTransformersConfig, dtype: torch.dtype = torch.float32
) -> STMoEForConditionalGeneration:
    """Returns our model of the same sizes with normal weights, which drops no token."""
    # Room for every token, as transformers' model gets it by its expert_capacity.
    fields = from_hf_config(config.to_diff_dict())
    fields |= {"expert_capacity": None, "capacity_factor": None, "eval_capacity_factor": None}
    with torch.device("meta"):
        model: Any = STMoEForConditionalGeneration(STMoEConfig(**fields))

    # Seconds of work, where the library's own truncated distributions take minutes.
    torch.manual_seed(0)
    model.to_empty(device="cpu").tie_weights()
    for weight in model.parameters():
        nn.init.normal_(weight, mean=float(weight.dim() == 1), std=weight.shape[-1] ** -0.5)
    return model.to(dtype)


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
    case: ModelCase, models: Mapping[str, Any], rounds: int
) -> Iterator[list[Row]]:
    """Yields a row for every model after every round: forward with its own losses, and backward.

    There is no update. On a GPU under autocast in bfloat16.
    """
    device = next(iter(models.values())).device
    inputs = draw_tokens(case, case.batch, case.input_length).to(device)
    labels = draw_tokens(case, case.batch, case.target_length).to(device)
    mask = torch.ones_like(inputs)

    def step(model: Any) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=inputs, attention_mask=mask, labels=labels).loss
        loss.backward()

    # All models in training mode, in turn.
    runs = {name: partial(step, model.train()) for name, model in models.items()}
    clears = {name: partial(model.zero_grad, set_to_none=True) for name, model in models.items()}
    tokens = case.batch * (case.input_length + case.target_length)
    times = measure_in_turn(runs, clears, rounds, device)
    return rows_by_round(times, partial(describe_rows, tokens=tokens))


def describe_rows(times: Sequence[Mapping[str, float]], *, tokens: int) -> list[Row]:
    """Returns a row for each model: milliseconds, tokens per second, and its time over every other's."""
    # Times of the same round are compared.
    names = list(times[0])
    rows: list[Row] = []
    for name in names:
        ms = statistics.median(round_[name] for round_ in times)
        rows.append(
            {
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


def compared_columns(rows: Sequence[Row], columns: Columns = COLUMNS) -> Columns:
    """Returns the columns of `rows`, with times over those of every other model."""

    def over(row: Row, name: str) -> str | None:
        return (
            ratio_text(row["over"][name], row["over_range"][name]) if name in row["over"] else None
        )

    names = dict.fromkeys(name for row in rows for name in row["over"])
    return [*columns, *((f"time / {name}", partial(over, name=name), "") for name in names)]
