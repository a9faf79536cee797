"""Held-out loss with experts, or dense feed-forward layers, of one model rounded to few bits."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import Columns, describe_machine, print_report, report_text, save_report
from benchmarks.surgery.pruning_frontier import document_losses, mean_difference, mean_loss
from moe.checkpoint.loading import load_complete
from moe.cli import Parser
from moe.commands.routing_inputs import add_inputs, read_batches, with_tokenizer
from moe.models.blocks import FeedForward
from moe.models.modeling import STMoEForConditionalGeneration
from moe.sparse.experts import Experts
from moe.sparse.layer import SparseFeedForward
from moe.tracing.recorder import TracedBatch

PARTS: Mapping[str, tuple[type[nn.Module], type[nn.Module]]] = {
    "experts": (Experts, SparseFeedForward),
    "dense": (FeedForward, FeedForward),
}
"""Modules with the weights, and the layers with the outputs."""

BITS = (8, 4, 3, 2)
GROUPS: Mapping[str, int | None] = {"32": 32, "row": None}
EXPECTED = {8: "0", 4: "below 0.01", 3: "", 2: "0.1 to 0.5"}
# What was expected of experts before the measurement; MoQE (arXiv:2310.02410) found them more
# robust than dense layers.


@dataclass(frozen=True)
class BitsBenchmark:
    """What to measure.

    Attributes:
        model: Folder of a sparse model with its tokenizer.
        corpus: Folder of a corpus with held-out text.
        json: File to save the table to; None for none.
    """

    model: Path
    corpus: Path
    json: Path | None = None


@torch.no_grad()
def run_bits(benchmark: BitsBenchmark) -> None:
    """Measures, prints a table and saves it."""
    parser = Parser()
    add_inputs(parser)
    options = parser.parse_args(["--corpus", str(benchmark.corpus)])
    model = load_complete(STMoEForConditionalGeneration, benchmark.model)
    inspected = with_tokenizer(benchmark.model, model, benchmark.model)
    batches = list(read_batches(options, inspected, read_task=None))
    before = document_losses(model.eval(), batches)

    rows: list[dict[str, Any]] = []
    for part, (kind, layer_kind) in PARTS.items():
        calls = record_calls(model, layer_kind, batches[0])
        for group, group_size in GROUPS.items():
            for bits in BITS:
                with rounded_weights(model, kind, bits, group_size) as error:
                    after = document_losses(model, batches)
                    errors = {"error": error, "output": relative_error(calls)}
                change, low, high = mean_difference(after, before)
                row = {"part": part, "group": group, "bits": bits, "expected": EXPECTED[bits]}
                rows.append({**row, **errors, "change": change, "low": low, "high": high})
    loss = mean_loss(before)
    report = {**describe_machine(torch.device("cpu")), "rounds": 1, "loss": loss, "rows": rows}
    save_report(report, benchmark.json)
    print_report(report_text(report, f"loss {loss:.4f} nats", COLUMNS), benchmark.json)


@contextmanager
def rounded_weights(
    model: nn.Module, kind: type[nn.Module], bits: int, group_size: int | None
) -> Iterator[float]:
    """Rounds the matrices of modules inside the block; yields the relative error of the weights."""
    modules = [module for module in model.modules() if type(module) is kind]
    weights = [weight for module in modules for weight in module.parameters()]
    originals = [weight.detach().clone() for weight in weights]
    squares = torch.zeros(2)
    for weight, original in zip(weights, originals, strict=True):
        weight.copy_(round_to_nearest(original, bits, group_size))
        squares += torch.stack([(weight - original).square().sum(), original.square().sum()])
    yield (squares[0] / squares[1]).sqrt().item()
    for weight, original in zip(weights, originals, strict=True):
        weight.copy_(original)


Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Tensor]
"""A layer, the arguments of its call, and its output with the weights before."""


def record_calls(model: nn.Module, kind: type[nn.Module], batch: TracedBatch) -> list[Call]:
    """Returns the calls of the layers of a kind for one batch."""
    calls: list[Call] = []

    def record(layer: nn.Module, args: Any, options: dict[str, Any], result: Any) -> None:
        calls.append((layer, args, options, _tokens_of(result)))

    layers = [module for module in model.modules() if type(module) is kind]
    hooks = [layer.register_forward_hook(record, with_kwargs=True) for layer in layers]
    model.eval()(**batch.batch)
    for hook in hooks:
        hook.remove()
    return calls


def relative_error(calls: Sequence[Call]) -> float:
    """Returns the error of the layers' outputs for equal inputs, over their norm, mean of layers."""
    errors = []
    for layer, args, options, output in calls:
        difference = _tokens_of(layer(*args, **options)) - output
        errors.append((difference.norm() / output.norm()).item())
    return sum(errors) / len(errors)


def _tokens_of(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def round_to_nearest(weight: Tensor, bits: int, group_size: int | None) -> Tensor:
    """Returns <float>[..., O, I] rounded to 2^bits steps from least to largest of each group of inputs."""
    groups = weight.unflatten(-1, (-1, group_size or weight.shape[-1]))  # [..., O, I/g, g]
    least, largest = groups.aminmax(dim=-1, keepdim=True)
    step = (largest - least).clamp_min(1e-12) / (2**bits - 1)
    return (((groups - least) / step).round() * step + least).flatten(-2)


COLUMNS: Columns = (
    ("part", "part", ""),
    ("weights that share a scale", "group", ""),
    ("bits", "bits", ""),
    ("error of weights", "error", ".1%"),
    ("of outputs", "output", ".1%"),
    ("change of loss (nats)", "change", "+.4f"),
    ("95 % from", "low", "+.4f"),
    ("to", "high", "+.4f"),
    ("expected of experts", "expected", ""),
)
