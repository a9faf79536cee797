"""The pruning frontier: loss with fewer and fewer experts, for every score and random ones.

    python -m benchmarks.surgery.pruning_frontier --model MODEL --corpus CORPUS --json pruning_frontier.json

Experts are masked, which equals cutting them from a model that drops no tokens. Every second held-out
document rates the experts, and the others measure the loss. The same command continues an interrupted
one.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.machine import Columns, describe_machine, report_table, save_report
from moe.cli import Parser, integer, path, run_main
from moe.commands.routing_inputs import load_inspected
from moe.data.pipeline import Batch
from moe.files import output_path
from moe.inspection.statistics.document_intervals import Estimate, TokenSums, mean_over_tokens
from moe.models.inputs import IGNORED_LABEL
from moe.models.modeling import STMoEForConditionalGeneration
from moe.sparse.editing import LayerKey, PlanEdit, edit_routing, sparse_layers
from moe.surgery.expert_scores import SCORES, Calibration, choose_among
from moe.surgery.prune import best_experts
from moe.tracing.examples import corrupted_batches, pretraining_noise
from moe.tracing.recorder import TracedBatch
from moe.tracing.texts import corpus_texts
from moe.training.heldout_loss import token_losses

EXPECTED = "flat to 6 of 8, cliff below 4; the encoder's experts matter more than the decoder's"
"""A bet from the literature, made before anything was measured."""

STACKS = {"encoder": ("encoder",), "decoder": ("decoder",), "both": ("encoder", "decoder")}
RANDOM = "random"
_SEEDS = (0, 1, 2)
_CONFIDENCE = 0.95
_ESTIMATES = ("change", "against_random")
_COLUMNS: Columns = [
    ("pruned", "stacks", ""),
    ("kept", "kept", ""),
    ("score", "score", ""),
    ("loss", "loss", ".4f"),
    ("change", "change", ""),
    ("minus random", "against_random", ""),
]


@torch.no_grad()
def document_losses(
    model: STMoEForConditionalGeneration, batches: Sequence[TracedBatch]
) -> TokenSums:
    """Returns the losses of a model in evaluation mode, in nats, and the number of targets."""
    num_documents = 1 + max(max(batch.documents) for batch in batches)
    sums = torch.zeros(num_documents, dtype=torch.float64)
    counts = torch.zeros(num_documents, dtype=torch.float64)
    for batch, documents, _ in batches:
        num_targets = (batch["labels"] != IGNORED_LABEL).sum(dim=1)
        document = torch.tensor(documents).repeat_interleave(num_targets)
        losses = token_losses(model, batch).losses
        sums.index_add_(0, document, losses)
        counts.index_add_(0, document, torch.ones_like(losses))
    return TokenSums(sums, counts)


def mean_difference(losses: TokenSums, others: TokenSums) -> Estimate:
    """Returns the mean difference of a target's loss, and its 95 % interval over documents."""
    differences = TokenSums(losses.sums - others.sums, losses.counts)
    return mean_over_tokens(differences).intervals(_CONFIDENCE)[0]


def mean_loss(losses: TokenSums) -> float:
    """Returns the mean loss of a target in nats."""
    return float(losses.sums.sum() / losses.counts.sum())


class Frontier(NamedTuple):
    """The measurements of one model.

    Attributes:
        model: The model.
        calibration: Batches that rate the experts.
        held_out: Batches that measure the loss.
        whole: Losses with all experts.
    """

    model: STMoEForConditionalGeneration
    calibration: Sequence[Batch]
    held_out: Sequence[TracedBatch]
    whole: TokenSums

    def rows(self, number: int) -> list[dict[str, Any]]:
        """Returns the rows with a number of experts: every score, in one stack or both."""
        numbers = dict.fromkeys(sparse_layers(self.model), number)
        calibration = Calibration(self.model, self.calibration, numbers)
        scores = {name: SCORES.get(name)(calibration) for name in SCORES.names() if name != RANDOM}
        draws = [SCORES.get(RANDOM)(replace(calibration, seed=seed)) for seed in _SEEDS]
        rows: list[dict[str, Any]] = []
        for stacks in STACKS:
            rule = {"stacks": stacks, "kept": number}
            randoms = [self.pruned(draw, **rule) for draw in draws]
            mean = torch.stack([losses.sums for losses in randoms]).mean(dim=0)
            random = TokenSums(mean, self.whole.counts)
            of_seeds = [mean_loss(losses) for losses in randoms]
            rows.append({**rule, **self._result(RANDOM, random), "loss_of_seeds": of_seeds})
            for name, layer_scores in scores.items():
                losses = self.pruned(layer_scores, **rule)
                against_random = mean_difference(losses, random)
                row = {**rule, **self._result(name, losses)}
                rows.append({**row, "against_random": against_random})
        return rows

    def pruned(self, scores: Mapping[LayerKey, Tensor], stacks: str, kept: int) -> TokenSums:
        """Returns the losses with the best experts alone, by scores <float64>[E] of the layers."""
        edits: dict[LayerKey, PlanEdit] = {}
        for key, layer in sparse_layers(self.model).items():
            if key[0] in STACKS[stacks]:
                experts = best_experts(scores[key], kept)
                edits[key] = partial(choose_among, layer.router, experts)
        with edit_routing(self.model, edits):
            return document_losses(self.model, self.held_out)

    def _result(self, score: str, losses: TokenSums) -> dict[str, Any]:
        change = mean_difference(losses, self.whole)
        return {"score": score, "loss": mean_loss(losses), "change": change}


def measure_whole(model: Path, corpus: Path, examples: int) -> Frontier:
    """Returns a model that drops no tokens, with batches of every second document and of the others."""
    inspected = load_inspected(model, dropless=True)
    texts = corpus_texts(corpus)
    halves: list[list[TracedBatch]] = []
    for first in (0, 1):
        batches = corrupted_batches(
            texts[first::2],
            inspected.tokenizer,
            inputs_length=64,
            batch_size=32,
            noise=pretraining_noise(inspected.model.config),
            most_examples=examples,
        )
        halves.append(list(batches))
    whole = document_losses(inspected.model.eval(), halves[1])
    return Frontier(inspected.model, [traced.batch for traced in halves[0]], halves[1], whole)


def format_report(report: Mapping[str, Any]) -> str:
    """Returns the table of a report, with what was expected."""
    rows = []
    for row in sorted(report["rows"], key=_row_order):
        estimates = {name: Estimate(*row[name]) for name in _ESTIMATES if name in row}
        rows.append({**row, **estimates})
    return (
        f"Loss of the whole model: {report['loss']:.4f} nats on {report['documents']} documents.\n"
        f"Expected: {EXPECTED}.\n\n{report_table(_COLUMNS, rows)}"
    )


def _row_order(row: Mapping[str, Any]) -> tuple[int, int]:
    return list(STACKS).index(row["stacks"]), -row["kept"]


def main(argv: Sequence[str]) -> None:
    """Measures what is not in the file yet, and prints the table."""
    parser = Parser(prog="python -m benchmarks.surgery.pruning_frontier", description=EXPECTED)
    parser.add_argument("--model", type=path, required=True, help="folder of a sparse model")
    parser.add_argument("--corpus", type=path, required=True, help="folder with held-out text")
    parser.add_argument("--examples", type=integer(least=1), default=512, help="of each half (512)")
    parser.add_argument("--json", required=True, help="file of the table")
    options = parser.parse_args(argv)
    target = output_path(options.json, suffix=".json", option="--json")

    torch.set_num_threads(1)
    frontier = measure_whole(options.model, options.corpus, options.examples)
    report = {
        **describe_machine(torch.device("cpu")),
        "expected": EXPECTED,
        "examples": options.examples,
        "documents": int((frontier.whole.counts > 0).sum()),
        "targets": int(frontier.whole.counts.sum()),
        "loss": mean_loss(frontier.whole),
        "rows": [],
    }
    if target.is_file():
        earlier = json.loads(target.read_text(encoding="utf-8"))
        if all(earlier[name] == report[name] for name in ("examples", "targets", "loss")):
            report["rows"] = earlier["rows"]

    # All rows of a number at once, since scores are compared with the same random experts.
    finished = {row["kept"] for row in report["rows"]}
    layers = sparse_layers(frontier.model).values()
    most = min(layer.config.num_experts for layer in layers) - 1
    for number in tqdm(range(most, 0, -1), desc="experts kept"):
        if number not in finished:
            report["rows"] += frontier.rows(number)
            save_report(report, target)
    print(format_report(report))
    print(f"The table is in {target}.")


if __name__ == "__main__":
    run_main(main)
