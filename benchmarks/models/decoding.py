"""Decoding beside the machine's memory: a greedy step of ours, packed or not, Switch, T5, CTranslate2.

A step reads weights and caches and does little else: its bytes per second are compared with those of
a copy. Its time is that of an answer less that of an answer of one token, in the same round.
"""

import copy
import operator
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.cases import DTYPES
from benchmarks.machine import build_copy, copy_gb_per_second, describe_machine
from benchmarks.models.model import (
    ModelCase,
    build_models,
    compared_columns,
    describe_rows,
    draw_tokens,
)
from benchmarks.models.serving import build_translators, generate, never_end
from benchmarks.report import Columns, Group, Row, measure_groups, rows_by_round
from benchmarks.timing import measure_in_turn
from moe.kernels.host_memory import keep_freed_memory
from moe.kernels.quantized_weight import Quantization, QuantizedWeight, quantize
from moe.sparse.plan import DispatchPlan, RouterScores
from moe.surgery.packing import pack_weights

WEIGHTS = (*DTYPES, "int8")
"""Dtypes, and experts of 8 bits beside other weights in bfloat16; in CTranslate2 all weights."""

CASE = ModelCase(input_length=128)
STEPS = 32
HEAD_SIZE = 64
_FIRST = "first token of "

Answer = Callable[[list[list[int]], int], Any]
"""Answers inputs with a number of tokens."""

Decoders = tuple[dict[str, Any], dict[str, Answer]]
"""Models of transformers by name, and what is measured, by the name of its row."""

_NOT_READ = re.compile(
    r"embed_tokens|position_bias|relative_attention_bias|(cross_attention|EncDecAttention)\.[kv]|\.experts\."
)
"""Weights of which a step reads no or a few rows, and experts, of which it reads some."""


def run_decoding(
    weights: Sequence[str],
    experts: Sequence[int],
    batches: Sequence[int],
    rounds: int,
    json: Path | None,
    case: ModelCase,
) -> None:
    """Measures, prints the table and saves it.

    Args:
        weights: Of `WEIGHTS`.
        experts: Numbers of experts.
        batches: Sequences to decode at once.
        rounds: How often everything is measured; results are medians.
        json: File to save to after every round; None for none.
        case: Sizes.
    """
    # As in training.
    keep_freed_memory()

    build = lru_cache(maxsize=1)(partial(build_decoders, case))
    groups: list[Group] = []
    for num_experts, kind, batch in product(experts, weights, batches):
        keys = {"experts": num_experts, "weights": kind, "batch": batch}
        build_these = partial(build, num_experts, kind)
        groups.append(Group(keys, partial(measure_steps, build_these, kind, case, batch, rounds)))
    settings = describe_machine(torch.device("cpu")) | {"rounds": rounds, "case": asdict(case)}
    tables = {"rows": partial(compared_columns, columns=COLUMNS)}
    measure_groups(settings, groups, tables, json)


def build_decoders(case: ModelCase, experts: int, kind: str) -> Decoders:
    """Returns the models whose weights are of a kind of `WEIGHTS`."""
    models = build_models(case, experts, dtype=DTYPES.get(kind, torch.bfloat16))
    for model in models.values():
        never_end(model.eval())
    if kind == "int8":
        quantize_experts(models["ours"], Quantization(8))
    models["packed"] = copy.deepcopy(models["ours"])
    pack_weights(models["packed"])
    answers: dict[str, Answer] = {name: partial(generate, model) for name, model in models.items()}
    if kind == "int8":
        answers = {name: answers[name] for name in ("ours", "packed")}
        del models["switch"]
    if kind != "bfloat16":
        for translate in build_translators(models["t5_sdpa"].float(), [kind]).values():
            answers["ctranslate2"] = translate
    return models, answers


def quantize_experts(model: Any, quantization: Quantization) -> None:
    """Quantizes the weights of the experts' products."""
    for layer in model.sparse_layers():
        for name, weight in list(layer.experts.named_parameters()):
            quantized = nn.Parameter(quantize(weight, quantization), requires_grad=False)
            setattr(layer.experts, name, quantized)


def measure_steps(
    build: Callable[[], Decoders], kind: str, case: ModelCase, batch: int, rounds: int
) -> Iterator[list[Row]]:
    """Yields a row for each model after every round.

    Ours and Switch, which have the same weights, should decode the same tokens, and so read the same
    experts; if they do not, a line says so.
    """
    models, answers = build()
    ours = models["ours"]
    inputs = draw_tokens(case, batch, case.input_length).tolist()
    used_experts, tokens = count_used_experts(ours, inputs, 1 + STEPS)
    if "switch" in answers and not torch.equal(answers["switch"](inputs, 1 + STEPS), tokens):
        tqdm.write(f"{kind}, batch {batch}: switch decodes other tokens, as where two logits tie")

    # Weights and caches; CTranslate2 has one byte for four in 8 bits, and its caches in float32.
    cached = cache_bytes(case, batch, ours.dtype)
    sparse_bytes = weight_bytes(ours, used_experts) + cached
    dense_bytes = weight_bytes(models["t5_sdpa"])
    num_bytes: dict[str, float] = dict.fromkeys(("ours", "packed", "switch"), sparse_bytes)
    num_bytes["t5_sdpa"] = dense_bytes + cached
    ct2_bytes = dense_bytes / 4 if kind == "int8" else dense_bytes
    num_bytes["ctranslate2"] = ct2_bytes + cache_bytes(case, batch, torch.float32)

    def describe(times: Sequence[dict[str, float]]) -> list[Row]:
        steps: list[dict[str, float]] = []
        for round_ in times:
            steps.append({name: (round_[name] - round_[_FIRST + name]) / STEPS for name in answers})
        rows = describe_rows(steps, tokens=batch)
        for row in rows:
            name = row["model"]
            speeds = [num_bytes[name] / step[name] / 1e6 for step in steps]
            copies = [copy_gb_per_second(round_) for round_ in times]
            row["step_mb"] = num_bytes[name] / 1e6
            row["gb_per_second"] = statistics.median(speeds)
            row["copy_gb_per_second"] = statistics.median(copies)
            row["of_copy"] = statistics.median(map(operator.truediv, speeds, copies))
        return rows

    runs = build_copy(torch.device("cpu"))
    for name, answer in answers.items():
        runs[name] = partial(answer, inputs, 1 + STEPS)
        runs[_FIRST + name] = partial(answer, inputs, 1)
    times = measure_in_turn(runs, {}, rounds, torch.device("cpu"))
    yield from rows_by_round(times, describe)


def count_used_experts(
    model: Any, inputs: list[list[int]], num_tokens: int
) -> tuple[float, Tensor]:
    """Returns how many experts a step after the first uses in all layers, on average, and the tokens.

    Args:
        model: Ours.
        inputs: Token ids of each sequence.
        num_tokens: Tokens to decode for each.
    """
    counts: list[int] = []

    def count(scores: RouterScores, plan: DispatchPlan) -> DispatchPlan:
        counts.append(plan.expert_index[plan.accepted].unique().numel())
        return plan

    layers = [layer for layer in model.sparse_layers() if layer.config.decoder]
    for layer in layers:
        layer.plan_edits = (count,)
    tokens = generate(model, inputs, num_tokens)
    for layer in layers:
        layer.plan_edits = ()
    return sum(counts[len(layers) :]) / (num_tokens - 1), tokens


def weight_bytes(model: Any, used_experts: float = 0.0) -> float:
    """Returns the bytes of the weights that a step reads: of decoder and head, with so many experts.

    Keys and values of the encoder's output are computed once, in the first step.
    """
    num_bytes = model.get_output_embeddings().weight.nbytes
    for name, weight in model.get_decoder().named_parameters():
        if not _NOT_READ.search(name):
            num_bytes += weight.nbytes
    if used_experts:
        experts = model.sparse_layers()[-1].experts
        expert_bytes = sum(map(_stored_bytes, experts.parameters())) / model.config.num_experts
        num_bytes += used_experts * expert_bytes
    return num_bytes


def _stored_bytes(weight: Tensor) -> int:
    if isinstance(weight, QuantizedWeight):
        return sum(part.nbytes for part in weight.parts().values())
    return weight.nbytes


def cache_bytes(case: ModelCase, batch: int, dtype: torch.dtype) -> float:
    """Returns the bytes of keys and values that a step reads in all layers, on average.

    Those of the encoder's tokens, and of the decoder's: 2 in the step after the first, and so on.
    """
    num_keys = case.input_length + (STEPS + 3) / 2
    width = case.num_heads * HEAD_SIZE
    return 2 * case.num_layers * batch * num_keys * width * dtype.itemsize


COLUMNS: Columns = (
    ("experts", "experts", ""),
    ("weights", "weights", ""),
    ("batch", "batch", ""),
    ("model", "model", ""),
    ("ms/step", "ms", ".1f"),
    ("tokens/s", "tokens_per_second", ".1f"),
    ("MB/step", "step_mb", ".0f"),
    ("GB/s", "gb_per_second", ".1f"),
    ("copy GB/s", "copy_gb_per_second", ".1f"),
    ("/ copy", "of_copy", ".2f"),
)
