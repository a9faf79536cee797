"""Traces and a tokenizer for the routing view, and its content read back from the page."""

import base64
import json
import re
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from moe.inspection.page.panel_data import AblationBar, ClassRow, Estimate, LayerClasses
from moe.inspection.page.routing_view import routing_view
from moe.tracing.recorder import record_routing, traced_batches
from moe.tracing.trace import CHOICES, Trace
from tests.models.tiny import tiny_batch, tiny_model

VOCABULARY = 131
NUM_BEST = 3

# Two sparse layers in the encoder, three in the decoder; experts that become full.
LAYERS = {
    "num_layers": 4,
    "num_decoder_layers": 3,
    "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 3,
    "sparse_dense_stacking": False,
    "eval_capacity_factor": 0.7,
    "min_expert_capacity": 1,
    "group_size": 64,
}


def tiny_tokenizer(**texts: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of 127 tokens, fewer than the model has; `t5="x"` sets one text."""
    names = ["<pad>", "</s>", "<unk>"]
    for number in range(3, VOCABULARY - 4):
        mark = "▁" if number % 2 else ""
        names.append(texts.get(f"t{number}", f"{mark}w{number}"))
    model = models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def tiny_trace(
    num_batches: int = 3, *, num_best: int = NUM_BEST, seed: int = 0, **changes
) -> Trace:
    model = tiny_model(seed, **{**LAYERS, **changes})
    batches = [tiny_batch(seed=number) for number in range(num_batches)]
    return record_routing(model, traced_batches(batches, "prose"), num_best=num_best)


def long_trace(trace: Trace, times: int) -> Trace:
    """Returns a trace of the same examples many times over; its statistics are multiplied too."""

    def repeat(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor] * times)

    parts = {}
    for name in ("encoder", "decoder"):
        stack = trace.stack(name)
        layers = []
        for layer in stack.layers:
            rows = {field: repeat(getattr(layer, field)) for field in CHOICES}
            stats = type(layer.stats)(*(value * times for value in layer.stats))
            layers.append(layer._replace(**rows, stats=stats))
        lengths = repeat(stack.starts.diff())
        parts[name] = stack._replace(
            ids=repeat(stack.ids),
            targets=repeat(stack.targets),
            starts=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            layers=tuple(layers),
        )
    num_examples = trace.facts.num_examples * times
    return trace._replace(
        **parts,
        facts=trace.facts._replace(num_examples=num_examples),
        document=torch.arange(num_examples, dtype=torch.int32),
        domain=repeat(trace.domain),
    )


def one_example(trace: Trace) -> Trace:
    """Returns a trace whose examples are one after the other in a single example."""
    parts = {}
    for name in ("encoder", "decoder"):
        stack = trace.stack(name)
        parts[name] = stack._replace(starts=torch.tensor([0, stack.ids.numel()]))
    return trace._replace(
        **parts,
        facts=trace.facts._replace(num_examples=1),
        document=trace.document[:1],
        domain=trace.domain[:1],
    )


def statistics(trace: Trace, name: str = "numbers") -> dict[str, Any]:
    """Returns class tables and bars with a text of the test's in them."""
    classes = []
    ablation = []
    for layer in trace.layers:
        num_experts = layer.facts.num_experts
        shares = [1 / num_experts] * num_experts
        lifts = [2.0, *[0.5] * (num_experts - 1)]
        p_values = [0.001, *[0.2] * (num_experts - 1)]
        row = ClassRow(name, 19, shares, lifts, p_values, Estimate(1.25, 1.0, 1.5))
        unseen = ClassRow("unseen", 0, [float("nan")] * num_experts, lifts, [1.0] * num_experts)
        classes.append(LayerClasses(layer.key, [row, unseen]))
        ablation.append(AblationBar(*layer.key, 0, 0.25, 0.125, 0.5, name, 19, [name], "drop"))
    return {"classes": classes, "ablation": ablation}


# ---------------------------------------------------------------------------
# What a page says


def view_of(trace: Trace, **options: Any) -> str:
    return routing_view(trace, tiny_tokenizer(), **options).html


def content_of(page: str) -> dict[str, Any]:
    """Returns the JSON of a page."""
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(data)


def unpacked(packed: dict[str, Any]) -> np.ndarray:
    dtype = np.dtype(f"<u{packed['size']}")
    return np.frombuffer(base64.b64decode(packed["data"]), dtype)


def stack_of(content: dict[str, Any], name: str) -> dict[str, Any]:
    return next(stack for stack in content["stacks"] if stack["stack"] == name)


def rows_of(trace: Trace, content: dict[str, Any], name: str) -> list[int]:
    """Returns the rows of a stack that a page shows, by its own account of examples and lengths."""
    starts = stack_of(content, name)["starts"]
    rows: list[int] = []
    for place, example in enumerate(content["examples"]):
        first = int(trace.stack(name).starts[example])
        rows += range(first, first + starts[place + 1] - starts[place])
    return rows
