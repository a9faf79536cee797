"""Adapters of experts beside full fine-tuning, frozen experts and plain PEFT, on a CPU.

Times are CPU time, the least over rounds in which all ways take turns. The ways of a part share
their weights, which are random. In a model attention has adapters in all ways but `full`.
"""

import copy
import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import process_time
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor, nn

from benchmarks.cases import DTYPES
from benchmarks.machine import describe_machine, format_report, save_report
from benchmarks.models.model import Row
from benchmarks.timing import measure_in_turn
from moe.kernels.quantized_weight import Quantization, quantize
from moe.models.configuration import STMoEConfig
from moe.models.lora import lora_config
from moe.models.modeling import STMoEForConditionalGeneration
from moe.sparse.layer import SparseFeedForward

Runs = Mapping[str, Callable[[], object]]

WAYS = ("frozen", "full", "rank 8", "rank 16", "PEFT")  # PEFT: its own forward pass, with rank 8

VOCAB_SIZE = 1000
SIZES = {"d_model": 512, "d_ff": 1024}
BATCH = (8, 16)  # sequences and their tokens, in the encoder and in the decoder
EXPERTS = 64
FEW_EXPERTS = 16  # of the models with quantized experts and in float64
LAYER_EXPERTS = (8, 16, 64, 128)
LAYER_TOKENS = {128: 1.0, 4096: 0.4}  # the tokens of a layer, with the share of rounds


def run_adapters(rounds: int, json: Path | None) -> None:
    """Measures, prints the tables and saves them; results are saved as they come in.

    Args:
        rounds: How often steps are measured; results are the least.
        json: File to save to after every part; None for none.
    """
    report = {**describe_machine(torch.device("cpu")), "rounds": rounds, "rows": []}
    for rows in measure_parts(rounds):
        report["rows"] += rows
        save_report(report, json)
    print(format_report(report, COLUMNS))


def measure_parts(rounds: int) -> Iterator[list[Row]]:
    """Yields the rows of one part after the other."""
    yield [measure_difference()]
    for quantization in (Quantization(8), Quantization(4, 32)):
        model = quantize_experts(build_model(FEW_EXPERTS), quantization)
        yield measure_steps(rounds, model, f"{quantization.bits} bits")
    for dtype in DTYPES:
        for num_experts in LAYER_EXPERTS:
            yield measure_layer(rounds, num_experts, dtype)

    yield measure_steps(rounds, build_model(EXPERTS), "floats")


def measure_difference() -> Row:
    """Returns a row with the largest difference of loss and gradients to plain PEFT, in float64."""
    ways = build_ways(build_model(FEW_EXPERTS).double())
    numbers: list[Tensor] = []
    for name in ("rank 8", "PEFT"):
        # PEFT begins with a B of zeros, for which the gradient of A is zero.
        torch.manual_seed(0)
        weights = trained_weights(ways[name])
        for weight in weights:
            nn.init.normal_(weight, std=0.1)
        loss = ways[name](**draw_batch()).loss
        gradients = torch.autograd.grad(loss, weights)
        numbers.append(torch.cat([x.flatten() for x in (loss, *gradients)]))

    keys = {"part": "difference", "setting": "float64", "way": "rank 8"}
    difference = (numbers[0] - numbers[1]).abs().max().item()
    return {**keys, "difference": difference, "largest": numbers[0].abs().max().item()}


def measure_layer(rounds: int, num_experts: int, dtype: str) -> list[Row]:
    """Returns a row for each way and number of tokens: forward and backward of one layer."""
    layer = build_model(num_experts).sparse_layers()[0].to(DTYPES[dtype])
    ways = build_ways(nn.Sequential(layer), attention=False)  # PEFT wants no `config` but its own

    def run(way: nn.Module, x: Tensor) -> None:
        output, _ = way(x)
        output.backward(torch.ones_like(output))
        way.zero_grad()

    rows: list[Row] = []
    for num_tokens, share in LAYER_TOKENS.items():
        x = torch.randn(1, num_tokens, SIZES["d_model"]).to(DTYPES[dtype]).requires_grad_()
        runs = {name: partial(run, way, x) for name, way in ways.items()}
        keys = {"part": "layer", "setting": dtype, "experts": num_experts, "tokens": num_tokens}
        rows += measure_ways(math.ceil(rounds * share), runs, keys)
    return rows


def measure_steps(rounds: int, model: Any, setting: str) -> list[Row]:
    """Returns a row for each way: CPU time and memory of forward, backward and AdamW.

    `peak_mb` is by how much a step raises the process's memory at its peak: by gradients and all that
    is temporary. `peak_share` is that above frozen experts', over the bytes of all experts.
    """
    batch = draw_batch()

    def step(way: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        way(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    # With a small rate the weights hardly change, and with them the experts' loads.
    ways = build_ways(model)
    runs: dict[str, Callable[[], object]] = {}
    for name, way in ways.items():
        optimizer = torch.optim.AdamW(trained_weights(way), lr=1e-6)
        runs[name] = partial(step, way, optimizer)
    keys = {"part": "step", "setting": setting, "experts": model.config.num_experts}
    rows = measure_ways(rounds, runs, {**keys, "tokens": batch["labels"].numel()})

    # The first row is that of frozen experts.
    expert_mb = sum(w.nbytes for name, w in model.named_parameters() if ".experts." in name) / 1e6
    for row in rows:
        row["peak_mb"] = measure_peak_mb(runs[row["way"]])
        row["peak_share"] = (row["peak_mb"] - rows[0]["peak_mb"]) / expert_mb
    return rows


def measure_ways(rounds: int, runs: Runs, keys: Row) -> list[Row]:
    """Returns a row for each way: its least CPU milliseconds, and those over others'."""
    times = list(measure_in_turn(runs, {}, rounds, torch.device("cpu"), process_time))
    least = {name: min(round_[name] for round_ in times) for name in runs}
    rows: list[Row] = []
    for name, ms in least.items():
        over = {f"over_{base}": ms / least[base] for base in ("frozen", "full")}
        rows.append({**keys, "way": name, "ms": ms, **over})
    return rows


def measure_peak_mb(run: Callable[[], object]) -> float:
    """Returns by how many MB a call raises this process's memory at its peak, on Linux."""
    # Freed memory goes back to the system; 5 lowers the recorded peak to the present memory.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    start = getrusage(RUSAGE_SELF).ru_maxrss
    run()
    return (getrusage(RUSAGE_SELF).ru_maxrss - start) * 1024 / 1e6


def build_model(num_experts: int) -> STMoEForConditionalGeneration:
    """Returns a model in training mode with normal weights, that drops no token.

    Encoder and decoder have two blocks each, one of them sparse.
    """
    layers = {"num_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "num_experts": num_experts,
        **SIZES,
        **layers,
    }
    with torch.device("meta"):
        model = STMoEForConditionalGeneration(STMoEConfig(**sizes, capacity_factor=None))

    # A second's work, where the library's own initialization takes a minute.
    torch.manual_seed(0)
    for weight in model.to_empty(device="cpu").parameters():
        nn.init.normal_(weight, mean=float(weight.dim() == 1), std=weight.shape[-1] ** -0.5)
    return model.train()


def quantize_experts(model: Any, quantization: Quantization) -> Any:
    """Returns the model with the weights of the experts' products quantized."""
    for layer in model.sparse_layers():
        for name in ("gate_up_proj", "down_proj"):
            weight = quantize(layer.experts.get_parameter(name), quantization)
            setattr(layer.experts, name, nn.Parameter(weight, requires_grad=False))
    return model


def draw_batch() -> dict[str, Tensor]:
    """Returns the input of a step, the same on every call."""
    torch.manual_seed(0)
    ids = torch.randint(2, VOCAB_SIZE, (2, *BATCH))
    return {"input_ids": ids[0], "labels": ids[1]}


def trained_weights(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that get a gradient."""
    return [weight for weight in module.parameters() if weight.requires_grad]


def build_ways(module: nn.Module, *, attention: bool = True) -> dict[str, nn.Module]:
    """Returns the ways to train a model or a layer, in the order of `WAYS`, over the same weights."""

    def share() -> Any:
        weights = {id(w): nn.Parameter(w.detach(), w.requires_grad) for w in module.parameters()}
        return copy.deepcopy(module, weights)

    ways: dict[str, Any] = {"frozen": share().requires_grad_(False), "full": share()}
    if attention:
        ways["frozen"] = get_peft_model(ways["frozen"], lora_config(module, experts=False))
    for name, rank in zip(WAYS[2:], (8, 16, 8), strict=True):
        ways[name] = get_peft_model(share(), lora_config(module, rank=rank, attention=attention))

    # A layer calls PEFT's wrappers, instead of reading them, where one has a hook.
    for layer in ways["PEFT"].modules():
        if isinstance(layer, SparseFeedForward):
            layer.experts.register_forward_hook(lambda *_: None)
    return ways


COLUMNS = [(name, name, "") for name in ("part", "setting", "experts", "tokens", "way")]
COLUMNS += [("CPU ms", "ms", ".1f"), ("/ full", "over_full", ".2f")]
COLUMNS += [("/ frozen", "over_frozen", ".2f"), ("peak MB", "peak_mb", ".0f")]
COLUMNS += [("difference", "difference", ".0e"), ("of at most", "largest", ".0f")]
