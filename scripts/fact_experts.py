"""Finds where a model keeps its facts: drops each expert in turn and counts the answers that are lost.

python -m scripts.fact_experts --model RUN/model --pairs FACTS/facts.jsonl
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from eval.reports.formatting import markdown_table
from moe.cli import Parser, integer, path, run_main
from moe.commands.routing_inputs import load_inspected
from moe.data.pair_files import read_pairs
from moe.data.pipeline import Batch
from moe.data.tokenizer import MODEL_MAX_LENGTH
from moe.models.modeling import STMoEForConditionalGeneration
from moe.sparse.editing import LayerKey, RoutingEdit, edit_routing, sparse_layers
from moe.sparse.edits import DropExperts
from moe.tracing.examples import SourceText, paired_batches

HEADER = (
    "layer",
    "recalled",
    "lost by one expert: mean (smallest, largest)",
    "share lost by exactly one, %",
    "share lost by none, %",
)

_BATCH_SIZE = 250


def main(argv: list[str]) -> None:
    """Prints a table of the layers."""
    parser = Parser(prog="python -m scripts.fact_experts", description="Where facts are kept.")
    parser.add_argument("--model", type=path, required=True, help="folder of a sparse model")
    parser.add_argument("--pairs", type=path, required=True, help="JSONL file of its facts")
    parser.add_argument(
        "--limit", type=integer(least=1), default=2_000, help="most facts to ask (2000)"
    )
    options = parser.parse_args(argv)

    _, model, tokenizer = load_inspected(options.model)
    facts = []
    for number, pair in enumerate(read_pairs(options.pairs)[: options.limit]):
        facts.append(SourceText(*pair.texts, document=number, domain=""))
    traced = paired_batches(
        facts,
        tokenizer,
        inputs_length=MODEL_MAX_LENGTH,
        targets_length=MODEL_MAX_LENGTH,
        batch_size=_BATCH_SIZE,
    )
    batches = [batch for batch, _, _ in traced]

    recalled = answers_right(model, batches, {})
    rows = []
    for key, layer in sparse_layers(model).items():
        lost: list[Tensor] = []
        for expert in tqdm(range(layer.config.num_experts), desc=str(key), unit="expert"):
            edits = {key: DropExperts(expert)}
            lost.append(recalled & ~answers_right(model, batches, edits))
        rows.append(layer_row(key, recalled, torch.stack(lost)))
    print(*markdown_table(HEADER, rows), sep="\n")


@torch.no_grad()
def answers_right(
    model: STMoEForConditionalGeneration,
    batches: Sequence[Batch],
    edits: Mapping[LayerKey, RoutingEdit],
) -> Tensor:
    """Returns <bool>[facts]: whether greedy decoding gives the answer.

    Each token is predicted from the right ones before it, so that the first wrong token decides, as it
    does in decoding.
    """
    right: list[Tensor] = []
    with edit_routing(model, edits):
        for batch in batches:
            labels = batch["labels"]
            predicted = model(**batch).logits.argmax(-1)
            right.append(((predicted == labels) | (labels == -100)).all(-1))
    return torch.cat(right)


def layer_row(key: LayerKey, recalled: Tensor, lost: Tensor) -> list[str]:
    """Returns the row of a layer.

    Args:
        key: Stack and number of the layer.
        recalled: <bool>[facts] answers of the unchanged model.
        lost: <bool>[E, facts] answers that it loses without an expert.
    """
    stack, number = key
    num_recalled = int(recalled.sum())
    by_expert = lost.sum(1)
    times_lost = lost.sum(0)[recalled]
    return [
        f"{stack} {number}",
        f"{num_recalled:,} of {len(recalled):,}",
        f"{by_expert.float().mean():.0f} ({by_expert.min()}, {by_expert.max()})",
        f"{100 * float((times_lost == 1).float().mean()):.1f}",
        f"{100 * float((times_lost == 0).float().mean()):.1f}",
    ]


if __name__ == "__main__":
    run_main(main)
