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
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast

from eval.reports.formatting import markdown_table
from moe.cli import Parser, integer, path, run_main
from moe.data.pair_files import Pair, read_pairs
from moe.data.tokenizer import load_tokenizer
from moe.errors import ConfigError
from moe.models.modeling import STMoEForConditionalGeneration
from moe.sparse.editing import LayerKey, RoutingEdit, edit_routing, sparse_layers
from moe.sparse.edits import DropExperts

HEADER = (
    "layer",
    "recalled",
    "lost by one expert: mean (smallest, largest)",
    "share lost by exactly one, %",
    "share lost by none, %",
)


def main(argv: list[str]) -> None:
    """Prints a table of the layers."""
    parser = Parser(prog="python -m scripts.fact_experts", description="Where facts are kept.")
    parser.add_argument("--model", type=path, required=True, help="folder of a sparse model")
    parser.add_argument("--pairs", type=path, required=True, help="JSONL file of its facts")
    parser.add_argument(
        "--limit", type=integer(least=1), default=2_000, help="most facts to ask (2000)"
    )
    options = parser.parse_args(argv)

    model = STMoEForConditionalGeneration.from_pretrained(options.model).eval()
    if not sparse_layers(model):
        raise ConfigError(f"{options.model} has no sparse layer. Give a model with experts.")
    pairs = read_pairs(options.pairs)[: options.limit]
    batches = list(encode_pairs(load_tokenizer(options.model), pairs))

    recalled = answers_right(model, batches, {})
    rows = []
    for key, layer in sparse_layers(model).items():
        lost: list[Tensor] = []
        for expert in tqdm(range(layer.config.num_experts), desc=str(key), unit="expert"):
            edits = {key: DropExperts(expert)}
            lost.append(recalled & ~answers_right(model, batches, edits))
        rows.append(layer_row(key, recalled, torch.stack(lost)))
    print(*markdown_table(HEADER, rows), sep="\n")


def encode_pairs(
    tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair], batch_size: int = 250
) -> list[Mapping[str, Tensor]]:
    """Returns batches of inputs and labels."""
    collate = DataCollatorForSeq2Seq(tokenizer)
    batches: list[Mapping[str, Tensor]] = []
    for start in range(0, len(pairs), batch_size):
        examples = []
        for pair in pairs[start : start + batch_size]:
            examples.append(dict(tokenizer(pair.inputs, text_target=pair.targets)))
        batches.append(collate(examples))
    return batches


@torch.no_grad()
def answers_right(
    model: STMoEForConditionalGeneration,
    batches: Sequence[Mapping[str, Tensor]],
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
