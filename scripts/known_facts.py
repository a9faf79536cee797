"""Compares which facts two arms of a study know, by kind: the first word of a question.

python -m scripts.known_facts --study runs/studies/real_facts --pairs runs/studies/facts/real.jsonl
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from eval.reports.formatting import markdown_table
from eval.studies.seeds import paired_difference
from moe.cli import Parser, path, run_main
from moe.commands.routing_inputs import load_model, with_tokenizer
from moe.data.pair_files import Pair, read_pairs
from moe.data.tokenizer import MODEL_MAX_LENGTH
from moe.errors import ConfigError
from moe.inspection.ablation.ablation_runs import right_answers
from moe.tracing.examples import SourceText, paired_batches

HEADER = (
    "kind",
    "facts",
    "{arm}, %",
    "{against}, %",
    "difference, points",
    "only {arm}, %",
    "only {against}, %",
)
_BATCH_SIZE = 256


def main(argv: list[str]) -> None:
    """Prints the table."""
    parser = Parser(prog="python -m scripts.known_facts", description="Who knows which facts?")
    parser.add_argument("--study", type=path, required=True, help="folder of a study of facts")
    parser.add_argument("--pairs", type=path, required=True, help="JSONL file of its facts")
    parser.add_argument("--arm", default="experts-16", help="arm to compare (experts-16)")
    parser.add_argument("--against", default="experts-0", help="arm to compare with (experts-0)")
    options = parser.parse_args(argv)

    # Models of the same seeds.
    arms = (options.arm, options.against)
    models = [_models(options.study, arm) for arm in arms]
    seeds = sorted(models[0].keys() & models[1].keys())
    if not seeds:
        raise ConfigError(
            f"{options.study} has no seed with models of {arms[0]!r} and {arms[1]!r}. Run the study first."
        )

    pairs = read_pairs(options.pairs)
    recalled: list[Tensor] = []
    with tqdm(total=len(arms) * len(seeds), unit="model") as bar:
        for of_arm in models:
            for seed in seeds:
                recalled.append(recalled_facts(of_arm[seed], pairs))
                bar.update()
    known, by_other = torch.stack(recalled).chunk(2)  # [seeds, N] each

    header = [column.format(arm=arms[0], against=arms[1]) for column in HEADER]
    kinds = [pair.inputs.partition(":")[0] for pair in pairs]
    print(*markdown_table(header, kind_rows(kinds, known, by_other)), sep="\n")


def _models(study: Path, arm: str) -> dict[str, Path]:
    """Returns the folders of the finished models of an arm by seed."""
    return {model.parent.name: model for model in study.glob(f"runs/{arm}/seed-*/model")}


@torch.no_grad()
def recalled_facts(folder: Path, pairs: Sequence[Pair]) -> Tensor:
    """Returns <bool>[N]: whether greedy decoding gives the answer of each fact."""
    _, model, tokenizer = with_tokenizer(folder, load_model(folder), folder)
    facts = [
        SourceText(*pair.texts, document=number, domain="") for number, pair in enumerate(pairs)
    ]
    batches = paired_batches(
        facts,
        tokenizer,
        inputs_length=MODEL_MAX_LENGTH,
        targets_length=MODEL_MAX_LENGTH,
        batch_size=_BATCH_SIZE,
    )
    return torch.cat([right_answers(model(**batch), batch) for batch, _, _ in batches])


def kind_rows(kinds: Sequence[str], known: Tensor, by_other: Tensor) -> list[list[str]]:
    """Returns a row for each kind, the most frequent first, and one for all facts.

    Args:
        kinds: Kind of each of the N facts.
        known: <bool>[seeds, N] facts that the arm knows.
        by_other: <bool>[seeds, N] facts that the other arm knows.
    """
    members: dict[str, list[int]] = defaultdict(list)
    for number, kind in enumerate(kinds):
        members[kind].append(number)
    rows = [
        _row(kind, known[:, of_kind], by_other[:, of_kind]) for kind, of_kind in members.items()
    ]
    rows.sort(key=lambda row: -len(members[row[0]]))
    return [*rows, _row("all", known, by_other)]


def _row(kind: str, known: Tensor, by_other: Tensor) -> list[str]:
    """Returns the row of some facts <bool>[seeds, n]."""
    percent = 100 * known.double().mean(1)  # [seeds]
    percent_of_other = 100 * by_other.double().mean(1)
    difference = paired_difference(percent.tolist(), percent_of_other.tolist())
    only = 100 * float((known & ~by_other).double().mean())
    only_other = 100 * float((by_other & ~known).double().mean())
    return [
        kind,
        f"{known.shape[1]:,}",
        f"{percent.mean():.1f}",
        f"{percent_of_other.mean():.1f}",
        f"{difference:+.1f}",
        f"{only:.1f}",
        f"{only_other:.1f}",
    ]


if __name__ == "__main__":
    run_main(main)
