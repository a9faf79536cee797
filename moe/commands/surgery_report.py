"""Effects of a surgery on a model: the same table for every command, printed, as JSON and in the card."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moe.files import write_text
from moe.inspection.statistics.document_intervals import Estimate, TokenSums, mean_over_tokens
from moe.inspection.tables import format_table
from moe.models.card import model_card, write_card
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.weight_files import find_weight_files
from moe.parsing import to_json
from moe.tracing.recorder import TracedBatch
from moe.training.heldout_loss import token_losses

REPORT_FILE = "surgery.json"

_HEADER = ["", "before", "after"]
_KEPT_HEADER = ["sparse layer", "kept in training", "in evaluation", "lost by"]
_CONFIDENCE = 0.95
_ANSWER_TOKENS = 32


class Measured(NamedTuple):
    """A model on N examples.

    Attributes:
        losses: <float64>[N] summed cross-entropy of the targets of each example, in nats.
        counts: <float64>[N] number of its targets.
        answers: <int64>[tokens] greedy answer to each example.
        documents: Number of the document of each example.
    """

    losses: Tensor
    counts: Tensor
    answers: list[Tensor]
    documents: list[int]


@torch.no_grad()
def measure(model: STMoEForConditionalGeneration, batches: Iterable[TracedBatch]) -> Measured:
    """Returns losses and greedy answers of a model in evaluation mode."""
    losses: list[float] = []
    counts: list[int] = []
    answers: list[Tensor] = []
    documents: list[int] = []
    model.eval()
    for batch, batch_documents, _ in batches:
        targets_per_example = (batch["labels"] != -100).sum(dim=1).tolist()
        of_targets = token_losses(model, batch).losses.split(targets_per_example)
        losses += [example.sum().item() for example in of_targets]
        counts += targets_per_example
        documents += batch_documents

        inputs = {name: value for name, value in batch.items() if name != "labels"}
        options = {"max_new_tokens": _ANSWER_TOKENS, "do_sample": False, "num_beams": 1}
        answers += model.generate(**inputs, **options).unbind()
    return Measured(
        torch.tensor(losses, dtype=torch.float64),
        torch.tensor(counts, dtype=torch.float64),
        answers,
        documents,
    )


@dataclass(frozen=True)
class SurgeryReport:
    """The surgery, and its effects on a model.

    Attributes:
        command: The command line.
        source: Folder or hub name of the model before.
        sizes: Name, number before and number after, of parameters and bytes.
        text: Evaluation data of both models; empty for none.
        loss: Mean loss in nats of a target, before and after; None without text.
        loss_change: Change of the loss and its 95 % interval over documents, paired.
        changed_answers: Examples whose greedy answer changed, and their number.
        kept: Share of the dense output that each sparse layer keeps: its name, the share in
            training and in evaluation, and the cause of the loss.
        seconds: Time of the whole command.
    """

    command: str
    source: str
    sizes: Sequence[tuple[str, int, int]]
    text: str
    loss: tuple[float, float] | None
    loss_change: Estimate | None
    changed_answers: tuple[int, int] | None
    kept: Sequence[tuple[str, float, float, str]]
    seconds: float

    def rows(self) -> list[list[str]]:
        """Returns the rows of the table: name, before, after."""
        rows = [[name, f"{before:,}", f"{after:,}"] for name, before, after in self.sizes]
        if self.loss is not None:
            before, after = self.loss
            rows.append(["loss (nats)", f"{before:.4f}", f"{after:.4f}"])
            rows.append(["its change, 95 % interval", "", str(self.loss_change)])
        if self.changed_answers is not None:
            changed, number = self.changed_answers
            rows.append(["greedy answers that changed", "", f"{changed:,} of {number:,}"])
        rows.append(["seconds", "", f"{self.seconds:.1f}"])
        return rows

    def kept_rows(self) -> list[list[str]]:
        """Returns a row for each sparse layer."""
        rows = []
        for layer, training, evaluation, reasons in self.kept:
            rows.append([layer, f"{training:.3f}", f"{evaluation:.3f}", reasons])
        return rows

    def __str__(self) -> str:
        """Returns the tables for a terminal."""
        text = format_table(_HEADER, self.rows())
        if self.kept:
            text += f"\n\n{format_table(_KEPT_HEADER, self.kept_rows())}"
        return text

    def markdown(self) -> str:
        """Returns the same for the model card."""
        lines = [f"Made from `{self.source}` by `{self.command}`.", ""]
        lines += [*_markdown_table(_HEADER, self.rows()), ""]
        if self.text:
            lines += [f"Measured on {self.text}.", ""]
        if self.kept:
            lines += [*_markdown_table(_KEPT_HEADER, self.kept_rows()), ""]
        return "\n".join(lines)

    def write(self, folder: Path) -> None:
        """Writes surgery.json and the model card into the folder of the model."""
        content = json.dumps(to_json(self), indent=1, ensure_ascii=False)
        write_text(folder / REPORT_FILE, content + "\n")
        config = STMoEConfig.from_pretrained(folder)
        write_card(folder, model_card(config, sections={"Surgery": self.markdown()}))


def size_rows(source: Path | str, folder: Path) -> list[tuple[str, int, int]]:
    """Returns parameters and bytes of weights of two models."""
    sizes = []
    for model in (source, folder):
        config = STMoEConfig.from_pretrained(model)
        num_bytes = sum(path.stat().st_size for path in find_weight_files(model))
        sizes.append((config.num_parameters(), config.num_active_parameters(), num_bytes))
    names = ("parameters", "parameters that a token uses", "bytes of weights")
    return [row for row in zip(names, *sizes, strict=True)]


def compare(before: Measured, after: Measured) -> tuple[tuple[float, float], Estimate, int]:
    """Returns both losses, the change of the loss, and the number of changed answers."""
    number = max(before.documents) + 1
    index = torch.tensor(before.documents)
    change = torch.zeros(number, dtype=torch.float64)
    change = change.index_add(0, index, after.losses - before.losses)
    counts = torch.zeros(number, dtype=torch.float64).index_add(0, index, before.counts)
    (estimate,) = mean_over_tokens(TokenSums(change, counts)).intervals(_CONFIDENCE)

    total = before.counts.sum()
    losses = (float(before.losses.sum() / total), float(after.losses.sum() / total))
    pairs = zip(before.answers, after.answers, strict=True)
    return losses, estimate, sum(not torch.equal(first, second) for first, second in pairs)


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]
