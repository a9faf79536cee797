"""Effects of a surgery on a model: the same table for every command, printed, as JSON and in the card."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe.checkpoint.loading import find_class
from moe.checksums import write_sums
from moe.estimates import Estimate, TokenSums, mean_over_tokens
from moe.files import write_text
from moe.hosts.all_hosts import count_parameters
from moe.hosts.model import SparseHost
from moe.inspection.tables import format_table
from moe.models.adapter_files import find_base
from moe.models.card import find_source_model, host_card, model_card, write_card
from moe.models.configuration import STMoEConfig
from moe.models.inputs import IGNORED_LABEL
from moe.models.weight_files import find_weight_files
from moe.parsing import to_json
from moe.sparse.editing import LayerKey, sparse_layers
from moe.tracing.examples import generated_batches
from moe.tracing.recorder import TracedBatch, record_routing
from moe.tracing.trace import LayerTrace, layer_name
from moe.training.heldout_loss import token_losses

REPORT_FILE = "surgery.json"

_HEADER = ["", "before", "after"]
_ROUTING_HEADER = [
    "sparse layer",
    "experts",
    "first expert changed",
    "busiest expert (1.0: equal shares)",
]
_CONFIDENCE = 0.95
_ANSWER_TOKENS = 32  # or twice the longest target


class ReportTable(NamedTuple):
    """A table of text, of one command."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


class SurgeryResult(NamedTuple):
    """Report of a command about its change, beyond the common table.

    Attributes:
        origins: <int64>[E after] for each router whose rows moved: the number that each row had
            before. Layers that are not named kept their rows.
        tables: Further tables.
    """

    origins: Mapping[LayerKey, Tensor] = MappingProxyType({})
    tables: Sequence[ReportTable] = ()


class Measured(NamedTuple):
    """A model on N examples.

    Attributes:
        losses: <float64>[N] summed cross-entropy of the targets of each example, in nats.
        counts: <float64>[N] number of its targets.
        answers: <int64>[tokens] greedy answer to each example, up to its end.
        documents: Number of the document of each example.
        layers: Routing of every token, by sparse layer; empty for a dense model.
    """

    losses: Tensor
    counts: Tensor
    answers: list[Tensor]
    documents: list[int]
    layers: Mapping[LayerKey, LayerTrace]


@torch.no_grad()
def measure(model: Any, batches: Sequence[TracedBatch]) -> Measured:
    """Returns losses, greedy answers and routing of a model in evaluation mode.

    Args:
        model: Ours or a host, dense or sparse.
        batches: Examples with labels.
    """
    losses: list[float] = []
    counts: list[int] = []
    answers: list[Tensor] = []
    documents: list[int] = []
    model.eval()
    for traced in batches:
        batch = traced.batch
        targets_per_example = (batch["labels"] != IGNORED_LABEL).sum(dim=1).tolist()
        of_targets = token_losses(model, batch).losses.split(targets_per_example)
        losses += [example.sum().item() for example in of_targets]
        counts += targets_per_example
        documents += traced.documents

        max_tokens = max(_ANSWER_TOKENS, 2 * max(targets_per_example))
        (answered,) = generated_batches(model, [traced], max_tokens=max_tokens)
        answers += [row[row != IGNORED_LABEL] for row in answered.batch["labels"]]

    layers = {}
    if sparse_layers(model):
        layers = {layer.key: layer for layer in record_routing(model, batches).layers}
    return Measured(
        torch.tensor(losses, dtype=torch.float64),
        torch.tensor(counts, dtype=torch.float64),
        answers,
        documents,
        layers,
    )


class Effects(NamedTuple):
    """Changes on the examples due to the surgery.

    Attributes:
        loss: Mean loss in nats of a target, before and after.
        loss_change: Change of the loss and its 95 % interval over documents, paired.
        changed_answers: Examples whose greedy answer changed, and their number.
        length_ratio: Tokens of all greedy answers for each token of their targets, before and after.
        routing: For each layer that is sparse before and after its name as `layer`, the share of
            tokens whose `first_expert_changed`, and the shares of the accepted choices that went to
            each router row, `load_before` and `load_after`.
    """

    loss: tuple[float, float]
    loss_change: Estimate
    changed_answers: tuple[int, int]
    length_ratio: tuple[float, float]
    routing: list[dict[str, Any]]


def write_report(
    folder: Path,
    *,
    command: str,
    sources: Sequence[Path | str],
    start: float,
    text: str = "",
    effects: Effects | None = None,
    tables: Sequence[ReportTable] = (),
) -> str:
    """Writes surgery.json and the model card of a changed model, and returns the tables for a terminal.

    Args:
        folder: The model after.
        command: The command line.
        sources: Folder or hub name of each model before.
        start: When the command started, by `time.perf_counter`.
        text: Evaluation data of both models; empty for none.
        effects: Changes on that data; None without.
        tables: Tables of the command itself.
    """
    sizes = _sizes(sources, folder)
    seconds = time.perf_counter() - start
    rows = [[name, *(f"{number:,}" for number in numbers)] for name, *numbers in sizes]
    routing = []
    if effects is not None:
        before, after = effects.loss
        changed, number = effects.changed_answers
        rows.append(["loss (nats)", f"{before:.4f}", f"{after:.4f}"])
        rows.append(["its change, 95 % interval", "", str(effects.loss_change)])
        rows.append(["greedy answers that changed", "", f"{changed:,} of {number:,}"])
        ratios = [f"{ratio:.3f}" for ratio in effects.length_ratio]
        rows.append(["length of greedy answers / of targets", *ratios])
        routing = [_routing_row(change) for change in effects.routing]
    rows.append(["seconds", *[""] * len(sources), f"{seconds:.1f}"])
    header = _HEADER if len(sources) == 1 else ["", *map(str, sources), "after"]
    all_tables = [ReportTable(header, rows), *tables]
    if routing:
        all_tables.insert(1, ReportTable(_ROUTING_HEADER, routing))

    source = ", ".join(map(str, sources))
    content = {"command": command, "source": source, "sizes": sizes, "text": text}
    content |= {"effects": effects, "tables": tables, "seconds": seconds}
    text_of_json = json.dumps(to_json(content), indent=1, ensure_ascii=False)
    write_text(folder / REPORT_FILE, text_of_json + "\n")

    lines = [f"Made from `{source}` by `{command}`.", ""]
    if text:
        lines += [f"Measured on {text}.", ""]
    for header, table_rows in all_tables:
        for cells in (header, ["---"] * len(header), *table_rows):
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    sections = {"Surgery": "\n".join(lines)}
    model_class = find_class(folder)
    if issubclass(model_class, SparseHost):
        card = host_card(model_class.__name__, sections)
    else:
        names: list[str] = []
        for name in map(find_source_model, sources):
            names += [name] if isinstance(name, str) else name or []
        config = STMoEConfig.from_pretrained(folder)
        card = model_card(config, base_model=list(dict.fromkeys(names)) or None, sections=sections)
    write_card(folder, card)
    write_sums(folder)
    return "\n\n".join(format_table(*table) for table in all_tables)


def _routing_row(change: Mapping[str, Any]) -> list[str]:
    loads = (change["load_before"], change["load_after"])
    experts = " → ".join(str(len(load)) for load in loads)
    busiest = " → ".join(f"{max(load) * len(load):.2f}" for load in loads)
    return [change["layer"], experts, f"{100 * change['first_expert_changed']:.1f} %", busiest]


def _sizes(sources: Sequence[Path | str], folder: Path) -> list[tuple[str | int, ...]]:
    """Returns parameters and bytes of weights of the models before and after, as rows with a name."""
    sizes = []
    for model in (*(find_base(source) or source for source in sources), folder):
        num_bytes = sum(path.stat().st_size for path in find_weight_files(model))
        sizes.append((*count_parameters(model), num_bytes))
    names = ("parameters", "parameters that a token uses", "bytes of weights")
    return [row for row in zip(names, *sizes, strict=True)]


def compare(before: Measured, after: Measured, origins: Mapping[LayerKey, Tensor]) -> Effects:
    """Returns what changed between two models on the same examples.

    Args:
        before: The model before.
        after: The model after.
        origins: See `SurgeryResult`.
    """
    # The change of the loss, document by document.
    num_documents = max(before.documents) + 1
    index = torch.tensor(before.documents)
    zeros = torch.zeros(num_documents, dtype=torch.float64)
    change = zeros.index_add(0, index, after.losses - before.losses)
    counts = zeros.index_add(0, index, before.counts)
    (loss_change,) = mean_over_tokens(TokenSums(change, counts), _CONFIDENCE)

    total = before.counts.sum()
    answers = zip(before.answers, after.answers, strict=True)
    num_changed = sum(not torch.equal(first, second) for first, second in answers)
    routing = []
    for key, layer in before.layers.items():
        if key in after.layers:
            routing.append(_routing_change(layer, after.layers[key], origins.get(key)))
    return Effects(
        loss=(float(before.losses.sum() / total), float(after.losses.sum() / total)),
        loss_change=loss_change,
        changed_answers=(num_changed, len(before.answers)),
        length_ratio=(_num_tokens(before) / float(total), _num_tokens(after) / float(total)),
        routing=routing,
    )


def _num_tokens(measured: Measured) -> int:
    return sum(answer.numel() for answer in measured.answers)


def _routing_change(
    before: LayerTrace, after: LayerTrace, origins: Tensor | None
) -> dict[str, Any]:
    first_after = after.first.long()
    if origins is not None:
        first_after = torch.where(first_after < 0, -1, origins[first_after])
    changed = (before.first.long() != first_after).double().mean()
    return {
        "layer": layer_name(before.key),
        "first_expert_changed": float(changed),
        "load_before": _load(before),
        "load_after": _load(after),
    }


def _load(layer: LayerTrace) -> list[float]:
    accepted = layer.expert[layer.accepted].long()
    counts = accepted.bincount(minlength=layer.facts.num_experts)
    return (counts / max(1, accepted.numel())).tolist()
