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
from moe.files import output_path
from moe.inspection.statistics.document_intervals import TokenSums, mean_over_tokens
from moe.models.modeling import STMoEForConditionalGeneration
from moe.sparse.editing import LayerKey, edit_routing, sparse_layers
from moe.sparse.edits import choose_again
from moe.sparse.plan import DispatchPlan, RouterScores
from moe.sparse.router import Router
from moe.surgery.expert_scores import SCORES, Calibration
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
_COLUMNS: Columns = [
    ("pruned", "stacks", ""),
    ("kept", "kept", ""),
    ("score", "score", ""),
    ("loss", "loss", ".4f"),
    ("change", "change_text", ""),
    ("minus random", "against_random_text", ""),
]


class Losses(NamedTuple):
    """Losses of a model.

    Attributes:
        sums: <float64>[documents] sum of the losses of the targets of each document, in nats.
        counts: <float64>[documents] their number.
    """

    sums: Tensor
    counts: Tensor

    def minus(self, other_sums: Tensor) -> list[float]:
        """Returns the mean difference of a target's loss, and its 95 % interval over documents."""
        estimates = mean_over_tokens(TokenSums(self.sums - other_sums, self.counts))
        return list(estimates.intervals(_CONFIDENCE)[0])


@torch.no_grad()
def document_losses(
    model: STMoEForConditionalGeneration, batches: Sequence[TracedBatch], num_documents: int
) -> Losses:
    """Returns the losses of a model in evaluation mode."""
    sums = torch.zeros(num_documents, dtype=torch.float64)
    counts = torch.zeros(num_documents, dtype=torch.float64)
    for batch, documents, _ in batches:
        is_target = batch["labels"] != -100  # [B, T]
        document = torch.tensor(documents)[:, None].expand_as(is_target)[is_target]
        losses = token_losses(model, batch).losses
        sums.index_add_(0, document, losses)
        counts.index_add_(0, document, torch.ones_like(losses))
    return Losses(sums, counts)


def mask_experts(
    router: Router, kept: Tensor, scores: RouterScores, plan: DispatchPlan
) -> DispatchPlan:
    """Returns the plan of a layer that has only some experts <int64>[n]; a token may then have fewer."""
    barred = torch.ones_like(scores.probs, dtype=torch.bool)  # [G, S, E]
    barred[..., kept] = False
    return choose_again(router, scores, plan, barred)


def pruned_losses(
    model: STMoEForConditionalGeneration,
    batches: Sequence[TracedBatch],
    kept: Mapping[LayerKey, Tensor],
    num_documents: int,
) -> Losses:
    """Returns the losses with only some experts <int64>[n] in some layers."""
    layers = sparse_layers(model)
    masks = {key: partial(mask_experts, layers[key].router, kept[key]) for key in kept}
    with edit_routing(model, masks):
        return document_losses(model, batches, num_documents)


class Frontier:
    """The measurements of one model."""

    def __init__(
        self,
        model: STMoEForConditionalGeneration,
        calibration: Sequence[TracedBatch],
        held_out: Sequence[TracedBatch],
    ) -> None:
        self.model = model
        self.calibration = [traced.batch for traced in calibration]
        self.held_out = held_out
        self.num_documents = 1 + max(max(traced.documents) for traced in held_out)
        self.whole = document_losses(model, held_out, self.num_documents)
        self.layers = sparse_layers(model)

    def rows(self, number: int) -> list[dict[str, Any]]:
        """Returns the rows with a number of experts: every score, in one stack or both."""
        calibration = Calibration(self.model, self.calibration, dict.fromkeys(self.layers, number))
        scores = {name: SCORES.get(name)(calibration) for name in SCORES.names() if name != RANDOM}
        draws = [SCORES.get(RANDOM)(replace(calibration, seed=seed)) for seed in _SEEDS]
        rows: list[dict[str, Any]] = []
        for stacks in STACKS:
            rows += self._stack_rows(stacks, number, scores, draws)
        return rows

    def _stack_rows(
        self,
        stacks: str,
        number: int,
        scores: Mapping[str, Mapping[LayerKey, Tensor]],
        draws: Sequence[Mapping[LayerKey, Tensor]],
    ) -> list[dict[str, Any]]:
        """Returns a row for random experts, the mean over their seeds, and for each score."""
        randoms = [self._losses(stacks, number, draw) for draw in draws]
        random_sums = torch.stack([losses.sums for losses in randoms]).mean(dim=0)
        random = Losses(random_sums, self.whole.counts)

        rows = [self._row(stacks, number, RANDOM, random)]
        rows[0]["loss_of_seeds"] = [_mean(losses) for losses in randoms]
        for name, layer_scores in scores.items():
            losses = self._losses(stacks, number, layer_scores)
            row = self._row(stacks, number, name, losses)
            rows.append({**row, "against_random": losses.minus(random_sums)})
        return rows

    def _losses(self, stacks: str, number: int, scores: Mapping[LayerKey, Tensor]) -> Losses:
        kept: dict[LayerKey, Tensor] = {}
        for key, layer_scores in scores.items():
            if key[0] in STACKS[stacks]:
                kept[key] = best_experts(layer_scores, number)
        return pruned_losses(self.model, self.held_out, kept, self.num_documents)

    def _row(self, stacks: str, number: int, score: str, losses: Losses) -> dict[str, Any]:
        return {
            "stacks": stacks,
            "kept": number,
            "score": score,
            "loss": _mean(losses),
            "change": losses.minus(self.whole.sums),
        }


def _mean(losses: Losses) -> float:
    return float(losses.sums.sum() / losses.counts.sum())


def split_batches(
    model: Path, corpus: Path, examples: int
) -> tuple[STMoEForConditionalGeneration, list[TracedBatch], list[TracedBatch]]:
    """Returns a model that drops no tokens, and batches of every second document and of the others."""
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
    return inspected.model.eval(), halves[0], halves[1]


def format_report(report: Mapping[str, Any]) -> str:
    """Returns the table of a report, with what was expected."""
    rows = []
    for row in sorted(report["rows"], key=_row_order):
        row = dict(row)
        for name in ("change", "against_random"):
            if name in row:
                value, low, high = row[name]
                row[f"{name}_text"] = f"{value:+.4f} [{low:+.4f}, {high:+.4f}]"
        rows.append(row)
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
    frontier = Frontier(*split_batches(options.model, options.corpus, options.examples))
    report = {
        **describe_machine(torch.device("cpu")),
        "expected": EXPECTED,
        "examples": options.examples,
        "documents": int((frontier.whole.counts > 0).sum()),
        "targets": int(frontier.whole.counts.sum()),
        "loss": _mean(frontier.whole),
        "rows": [],
    }
    if target.is_file():
        earlier = json.loads(target.read_text(encoding="utf-8"))
        if all(earlier[name] == report[name] for name in ("examples", "targets", "loss")):
            report["rows"] = earlier["rows"]

    # All rows of a number at once, since scores are compared with the same random experts.
    finished = {row["kept"] for row in report["rows"]}
    most = min(layer.config.num_experts for layer in frontier.layers.values()) - 1
    for number in tqdm(range(most, 0, -1), desc="experts kept"):
        if number not in finished:
            report["rows"] += frontier.rows(number)
            save_report(report, target)
    print(format_report(report))
    print(f"The table is in {target}.")


if __name__ == "__main__":
    run_main(main)
