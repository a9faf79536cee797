"""What a language loses when a model is pruned to the experts that the language needs.

    python -m scripts.carve_study --runs runs --names names40 --out carve.jsonl [--seeds 0 1 2]

Comes after the runs of `recipes/studies/languages.yaml`. Measures models that are there, one pruned model a line, and
continues where it was interrupted; then prints the tables below the study's expectation.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import yaml

from moe.checkpoint.loading import load_model
from moe.cli import Parser, integer, path, run_main
from moe.data.names import LANGUAGES
from moe.data.pair_files import Pair, read_pairs
from moe.data.tokenizer import load_tokenizer
from moe.inspection.statistics.specialization import ClassTable, shared_load
from moe.serving.batch_generator import BatchGenerator
from moe.sparse.editing import sparse_layers
from moe.surgery.expert_statistics import expert_statistics
from moe.surgery.prune import SCORES, best_experts, prune_checkpoint
from moe.tracing.examples import SourceText, generated_batches, paired_batches
from scripts.names_model import Model, language_of, language_tables, trace_names
from stmoe_eval.reports.formatting import markdown_table
from stmoe_eval.studies.seeds import paired_difference

EXPECTATION = Path("recipes/studies/languages.yaml")
SETS = ("trained", "test")
TRAINED_NAMES = 150
RATED_NAMES = 512  # of a language, by which its experts are rated
TRACED_NAMES = 300  # of each language, for the load that languages share
WHOLE = ("whole", 0)
CASES = (WHOLE, *itertools.product(("reap", "frequency", "random"), (16, 8, 4)))  # score, experts
LOADS = ("all", "pairs", "largest 8")
Row = dict[str, Any]
Names = dict[str, list[Pair]]


def main(argv: list[str]) -> None:
    """Measures what is missing, and prints the tables."""
    parser = Parser(prog="python -m scripts.carve_study", description="Pruning for a language.")
    parser.add_argument("--runs", type=path, required=True, help="folder of ARM/seed-N/model")
    parser.add_argument("--names", type=path, required=True, help="folder of the names")
    parser.add_argument("--out", type=path, required=True, help="the measurements, one a line")
    parser.add_argument("--seeds", type=integer(least=0), nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=["ordinary", "pools"])
    options = parser.parse_args(argv)
    sets = {"train": {}, "test": {}}
    for name, groups in sets.items():
        for pair in read_pairs(options.names / f"{name}.jsonl"):
            groups.setdefault(language_of(pair), []).append(pair)
    for seed, arm in itertools.product(options.seeds, options.arms):
        folder = options.runs / arm / f"seed-{seed}" / "model"
        rows = read_rows(options.out)
        for row in measure(folder, sets, {"arm": arm, "seed": seed}, rows):
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(f"Expected: {yaml.safe_load(EXPECTATION.read_text())['expected']}\n")
    print_tables(read_rows(options.out), options.arms)


def read_rows(path: Path) -> list[Row]:
    """Returns what was measured."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(folder: Path, sets: dict[str, Names], run: Row, rows: Sequence[Row]) -> Iterator[Row]:
    """Yields what was not measured: the shared load of a model, and each case of each language."""
    if not folder.exists():
        return
    model = load_model(folder).eval(), load_tokenizer(folder)
    of_run = [row for row in rows if run.items() <= row.items()]
    if not any("stack" in row for row in of_run):
        pairs = [pair for each in sets["train"].values() for pair in evenly(each, TRACED_NAMES)]
        for table in language_tables(trace_names(model, pairs, list(map(language_of, pairs)))):
            yield {**run, "stack": table.layer[0], **loads(table)}
    done = {(row["language"], row["score"], row["keep"]) for row in of_run if "score" in row}
    for number, language in enumerate(LANGUAGES):
        names = {name: of_language[language] for name, of_language in sets.items()}
        if not (missing := [case for case in CASES if (language, *case) not in done]):
            continue
        ratings = rate(model, evenly(names["train"], RATED_NAMES), 100 * run["seed"] + number)
        for score, keep in missing:
            row = {**run, "language": language, "score": score, "keep": keep}
            if (score, keep) == WHOLE:
                yield {**row, **exact(model, names)}
                continue
            kept = {key: best_experts(of_layer, keep) for key, of_layer in ratings[score].items()}
            with TemporaryDirectory() as pruned:
                prune_checkpoint(folder, Path(pruned), kept)
                yield {**row, **exact((load_model(pruned).eval(), model[1]), names)}


def rate(model: Model, pairs: Sequence[Pair], seed: int) -> dict[str, Any]:
    """Returns scores of the experts on some pairs, by layer, as `stmoe prune` rates them."""
    texts = [SourceText(*pair.texts, 0, "") for pair in pairs]
    batches = paired_batches(texts, model[1], inputs_length=32, targets_length=64, batch_size=256)
    traced = list(batches)
    answers = generated_batches(model[0], traced, max_tokens=64)
    read_by_encoder = [each.batch for each in traced]
    read_by_decoder = [*read_by_encoder, *(each.batch for each in answers)]
    read = {"encoder": read_by_encoder, "decoder": read_by_decoder}
    statistics = {stack: expert_statistics(model[0], batches) for stack, batches in read.items()}
    ratings: dict[str, Any] = defaultdict(dict)
    generator = torch.Generator().manual_seed(seed)
    for key, layer in sparse_layers(model[0]).items():
        ratings["random"][key] = torch.rand(layer.config.num_experts, generator=generator)
        for score, rated in SCORES.items():
            ratings[score][key] = rated(statistics[key[0]][key])
    return ratings


def exact(model: Model, names: Names) -> Row:
    """Returns exact match, in percent, on names that were trained on and on all that were not."""
    trained = evenly(names["train"], TRAINED_NAMES)
    pairs = trained + names["test"]
    generator = BatchGenerator(*model, max_batch=256, max_new_tokens=64)
    answers = generator(pair.inputs for pair in pairs)
    right = 100 * np.array([a == pair.targets for a, pair in zip(answers, pairs, strict=True)])
    return {"trained": right[: len(trained)].mean(), "test": right[len(trained) :].mean()}


def evenly(pairs: Sequence[Pair], number: int) -> list[Pair]:
    """Returns some of the pairs, evenly spaced."""
    return [pairs[index * len(pairs) // number] for index in range(number)]


def loads(table: ClassTable) -> Row:
    """Returns the load that all languages share, that two share, and that of eight experts."""
    overlap = torch.minimum(table.share[:, None], table.share).sum(dim=-1)  # [C, C]
    others = ~torch.eye(len(overlap), dtype=torch.bool)
    largest = table.share.mean(dim=0).topk(8).values.sum()
    values = shared_load(table), float(overlap[others].mean()), float(largest)
    return {name: round(value, 3) for name, value in zip(LOADS, values, strict=True)}


def print_tables(rows: Sequence[Row], arms: Sequence[str]) -> None:
    """Prints recall and losses, with intervals over seeds and over languages, and shared load."""
    lines = []
    for arm, case in itertools.product(arms, CASES):
        line = [arm, case[0], str(case[1])]
        for name in SETS:
            whole, pruned = (grid(rows, arm, each, name) for each in (WHOLE, case))
            seeds = sorted(whole.keys() & pruned.keys())
            if seeds:
                a, b = (np.array([values[seed] for seed in seeds]) for values in (whole, pruned))
                b = 0 * a if case == WHOLE else b
                line += [f"{paired_difference(a.mean(axis), b.mean(axis)):.1f}" for axis in (1, 0)]
        lines.append([*line, *[""] * (7 - len(line))])
    header = [f"{name}, over {unit}" for name in SETS for unit in ("seeds", "languages")]
    print(*markdown_table(["arm", "score", "experts", *header], lines), "", sep="\n")
    header = ["stack", "arm", "seed", *LOADS]
    table = [[str(row[name]) for name in header] for row in rows if "stack" in row]
    print(*markdown_table(header, sorted(table)), sep="\n")


def grid(rows: Sequence[Row], arm: str, case: Any, name: str) -> dict[int, list[float]]:
    """Returns the exact match of the languages, for each seed that has all of them."""
    by_seed: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row["arm"] == arm and (row.get("score"), row.get("keep")) == case:
            by_seed[row["seed"]].append(row[name])
    return {seed: each for seed, each in by_seed.items() if len(each) == len(LANGUAGES)}


if __name__ == "__main__":
    run_main(main)
