"""What the models of the study of names know of names never seen, and what their experts stay with.

    python -m scripts.names_study --study runs/studies/names --names runs/studies/names12

Comes after `python -m scripts.study recipes/studies/names.yaml`, which measures the recall of names seen in training.
Prints two tables: names never seen by arm, and, for the arm of `--arm`, how much its experts tell about the language,
with the language's code in the input and without, and how far two seeds group the same tokens alike.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import itertools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from moe.checkpoint.loading import load_model
from moe.cli import Parser, path, run_main
from moe.data.pair_files import read_pairs
from moe.data.tokenizer import load_tokenizer
from moe.errors import DataError
from moe.inspection.statistics.contingency import mutual_information
from moe.inspection.statistics.matching import ExpertMatching, match_traces
from moe.sparse.editing import LayerKey
from moe.tracing.trace import Trace, layer_name
from scripts.names_model import language_of, language_tables, right_answers, trace_names
from stmoe_eval.reports.formatting import markdown_table
from stmoe_eval.studies.seeds import paired_difference


def main(argv: list[str]) -> None:
    """Prints the tables."""
    parser = Parser(prog="python -m scripts.names_study", description="Names never seen; experts.")
    parser.add_argument("--study", type=path, required=True, help="folder of the study")
    parser.add_argument("--names", type=path, required=True, help="folder of its names")
    parser.add_argument("--arm", default="experts-32", help="arm whose experts are traced")
    parser.add_argument(
        "--against", default="experts-0", help="arm that the others are compared with"
    )
    options = parser.parse_args(argv)
    models: dict[str, dict[str, Path]] = defaultdict(dict)
    for folder in sorted(options.study.glob("runs/*/seed-*/model")):
        models[folder.parts[-3]][folder.parts[-2]] = folder
    for arm in (options.arm, options.against):
        if arm not in models:
            raise DataError(
                f"{options.study} has no finished run of the arm {arm!r}. Run the study first."
            )

    # Exact answers for names of a language that were held out.
    test = read_pairs(options.names / "test.jsonl")
    unseen: dict[str, dict[str, float]] = defaultdict(dict)
    for arm, of_arm in models.items():
        for seed, folder in of_arm.items():
            right = right_answers((load_model(folder).eval(), load_tokenizer(folder)), test)
            unseen[arm][seed] = 100 * float(right.mean())
    rows = []
    for arm, scores in unseen.items():
        seeds = sorted(scores.keys() & unseen[options.against].keys())
        difference = (
            "" if arm == options.against else f"{_gap(unseen, arm, options.against, seeds):+.1f}"
        )
        rows.append([arm, str(len(scores)), f"{np.mean(list(scores.values())):.1f}", difference])
    header = [
        "arm",
        "seeds",
        f"exact of {len(test):,} names never seen, %",
        f"minus {options.against}, points",
    ]
    print(*markdown_table(header, rows), "", sep="\n")

    # The experts, with the language's code and without, and of two seeds.
    untagged = [pair._replace(inputs=pair.inputs.partition(": ")[2]) for pair in test]
    languages = [language_of(pair) for pair in test]
    traces: dict[str, Trace] = {}
    information: dict[LayerKey, list[list[float]]] = defaultdict(list)
    for seed, folder in models[options.arm].items():
        model = load_model(folder).eval(), load_tokenizer(folder)
        traces[seed] = trace_names(model, test, languages)
        for trace in (traces[seed], trace_names(model, untagged, languages)):
            for table in language_tables(trace):
                told = float(mutual_information(table.counts))
                information[table.layer].append([told, _entropy(table.counts)])
    rows = []
    for layer, values in information.items():
        tagged, without = np.array(values[::2]), np.array(values[1::2])
        alike = [matching.adjusted_rand for matching in _matchings(traces, layer)]
        rows.append(
            [
                layer_name(layer),
                f"{tagged[:, 1].mean():.2f}",
                _range(tagged[:, 0]),
                _range(without[:, 0]),
                _range(np.array(alike)),
            ]
        )
    header = [
        "layer",
        "entropy of languages, nats",
        "told by the expert",
        "without the code",
        "two seeds, adjusted Rand",
    ]
    print(*markdown_table(header, rows), sep="\n")


def _gap(unseen: dict[str, dict[str, float]], arm: str, against: str, seeds: list[str]):
    """Returns the paired difference of two arms over their seeds."""
    return paired_difference(
        [unseen[arm][seed] for seed in seeds], [unseen[against][seed] for seed in seeds]
    )


def _matchings(traces: dict[str, Trace], layer: LayerKey) -> Iterator[ExpertMatching]:
    """Yields how alike each two seeds group the tokens of a layer."""
    for one, other in itertools.combinations(traces.values(), 2):
        yield match_traces(one, other)[layer]


def _entropy(counts: torch.Tensor) -> float:
    shares = counts.sum(1) / counts.sum()
    return float(torch.special.entr(shares).sum())


def _range(values: np.ndarray) -> str:
    """Returns the mean of some seeds, and their smallest and largest value."""
    if not len(values):
        return ""
    return f"{values.mean():.2f} ({values.min():.2f} to {values.max():.2f})"


if __name__ == "__main__":
    run_main(main)
