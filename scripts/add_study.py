"""What new experts learn of a new language, beside joint training, and beside a dense model and what that forgets.

    python -m scripts.add_study --runs runs --names data --out add.jsonl [--languages mk zu] [--seeds 0 1 2]

Comes after the runs of `recipes/studies/languages.yaml`. Measures models that are there, one model a line, and
continues where it was interrupted; then prints the table below the study's expectation.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import yaml

import stmoe
from moe.checkpoint.loading import load_model
from moe.cli import Parser, integer, path, run_main
from moe.data.pair_files import Pair, read_pairs
from moe.data.tokenizer import load_tokenizer
from moe.serving.batch_generator import BatchGenerator
from moe.tracing.examples import SourceText, paired_batches
from scripts.carve_study import EXPECTATION, Names, Row, read_rows
from scripts.names_model import LONGEST_ANSWER
from stmoe_eval.reports.formatting import markdown_table
from stmoe_eval.studies.seeds import paired_difference

RECIPE = "names_add_language"
NEW = ["az", "eu", "gl", "hr", "is", "mk", "mr", "sk", "ur", "zu"]
TRAINED_NAMES, OLD_NAMES = 300, 600
EXPERTS = 32 + 8
ARMS = ("ordinary", "joint", "dense")
DENSE = ["--parameters", "all", "--optim.lr", "0.01"]  # the rate of recipes/names_new_language.yaml
CONTRASTS = [
    ("new names trained on, new experts minus joint", "trained", ("added", "joint")),
    ("new names never seen, new experts minus joint", "test", ("added", "joint")),
    ("new names trained on, new experts minus dense", "trained", ("added", "tuned")),
    ("new names never seen, new experts minus dense", "test", ("added", "tuned")),
    ("40 languages trained on, dense after minus before", "old_trained", ("tuned", "dense")),
    ("40 languages never seen, dense after minus before", "old_test", ("tuned", "dense")),
]


def main(argv: list[str]) -> None:
    """Measures what is missing, and prints the table."""
    parser = Parser(prog="python -m scripts.add_study", description="New experts for a language.")
    parser.add_argument("--runs", type=path, required=True, help="folder of ARM/seed-N/model")
    parser.add_argument("--names", type=path, required=True, help="folder of names40, names-mk ...")
    parser.add_argument("--out", type=path, required=True, help="the measurements, one a line")
    parser.add_argument("--languages", nargs="+", default=NEW)
    parser.add_argument("--seeds", type=integer(least=0), nargs="+", default=[0, 1, 2])
    options = parser.parse_args(argv)
    names40 = options.names / "names40"
    old = {"old_trained": read(names40, "seen", OLD_NAMES), "old_test": read(names40, "test")}
    for seed in options.seeds:
        models = [options.runs / arm / f"seed-{seed}" / "model" for arm in ARMS]
        if not all(model.exists() for model in models):
            continue
        for row in measure(models, options, old, seed):
            with options.out.open("a") as file:
                file.write(json.dumps({**row, "seed": seed}) + "\n")
    print(f"Expected: {yaml.safe_load(EXPECTATION.read_text())['expected']}\n")
    print_table(read_rows(options.out))


def read(folder: Path, file: str, number: int | None = None) -> list[Pair]:
    """Returns some pairs of a file that lie evenly in it, or all."""
    pairs = read_pairs(folder / f"{file}.jsonl")
    places = np.linspace(0, len(pairs) - 1, min(number or len(pairs), len(pairs))).astype(int)
    return [pairs[place] for place in places]


def measure(models: Sequence[Path], options: Any, old: Names, seed: int) -> Iterator[Row]:
    """Yields what was not measured of the models of one seed."""
    ordinary, joint, dense = models
    done = [(row["case"], row["language"]) for row in read_rows(options.out) if row["seed"] == seed]
    before = None
    if ("dense", "") not in done:
        yield {"case": "dense", "language": "", **exact(dense, old)}
    for language in options.languages:
        folder = options.names / f"names-{language}"
        new = {"trained": read(folder, "train", TRAINED_NAMES), "test": read(folder, "test")}
        if ("joint", language) not in done:
            yield {"case": "joint", "language": language, **exact(joint, new)}
        with TemporaryDirectory() as work:
            larger, added, tuned = (Path(work) / name for name in ("larger", "added", "tuned"))
            if ("added", language) not in done:
                before = before or digests(ordinary, old["old_test"])
                used = ["--pairs", folder / "train.jsonl", "--examples", 200]
                words = ["--experts", EXPERTS, "--prefix", f"{language}:", *used]
                run("upcycle", "--from", ordinary, "--to", larger, *words)
                finetune(larger, folder, added, seed)
                row = {"case": "added", "language": language, **exact(added / "model", new)}
                yield {**row, "same": digests(added / "model", old["old_test"]) == before}
            if ("tuned", language) not in done:
                finetune(dense, folder, tuned, seed, *DENSE)
                row = {"case": "tuned", "language": language}
                yield {**row, **exact(tuned / "model", {**new, **old})}


def finetune(model: Path, names: Path, out: Path, seed: int, *more: object) -> None:
    """Trains a model on the names of a language."""
    data = ["--train", names / "train.jsonl", "--dev", names / "dev.jsonl", "--seed", seed]
    run("finetune", "--config", RECIPE, "--pretrained", model, *data, "--out", out, *more)


def run(*words: object) -> None:
    """Runs a command without its output."""
    with redirect_stdout(StringIO()):
        stmoe.main([str(word) for word in words])


def answers(folder: Path, pairs: Sequence[Pair]) -> list[str]:
    """Returns the greedy answer of a model to each name."""
    model = load_model(folder).eval(), load_tokenizer(folder)
    generator = BatchGenerator(*model, max_batch=64, max_new_tokens=LONGEST_ANSWER)
    return [answer.text for answer in generator.map(pair.inputs for pair in pairs)]


def exact(folder: Path, sets: Names) -> dict[str, float]:
    """Returns the exact match of a model on each set of names, in percent."""
    scores = {}
    for name, pairs in sets.items():
        given = answers(folder, pairs)
        right = [text == pair.targets for text, pair in zip(given, pairs, strict=True)]
        scores[name] = 100 * float(np.mean(right))
    return scores


@torch.no_grad()
def digests(folder: Path, pairs: Sequence[Pair]) -> tuple[str, str]:
    """Returns checksums of a model's answers, and of the log-probabilities of all tokens after each target's."""
    model, tokenizer = load_model(folder).eval(), load_tokenizer(folder)
    texts = [SourceText(*pair.texts, 0, "") for pair in pairs]
    log_probs = hashlib.sha256()
    for each in paired_batches(
        texts, tokenizer, inputs_length=32, targets_length=64, batch_size=64
    ):
        logits = model(**each.batch).logits[each.batch["labels"] != -100]
        log_probs.update(logits.log_softmax(dim=-1).numpy().tobytes())
    text = "\n".join(answers(folder, pairs))
    return hashlib.sha256(text.encode()).hexdigest(), log_probs.hexdigest()


def print_table(rows: Sequence[Row]) -> None:
    """Prints the contrasts, paired over languages and seeds, and how many models kept every bit."""
    by_cell = {(row["case"], row["language"], row["seed"]): row for row in rows}
    table = []
    for title, name, cases in CONTRASTS:
        values: list[list[float]] = []
        for case, language, seed in by_cell:
            keys = [(each, "" if each == "dense" else language, seed) for each in cases]
            if case == cases[0] and all(key in by_cell for key in keys):
                values.append([by_cell[key][name] for key in keys])
        if values:
            first, second = zip(*values, strict=True)
            means = [f"{np.mean(first):.1f}", f"{np.mean(second):.1f}"]
            gap = f"{paired_difference(first, second):+.1f}"
            table.append([title, str(len(values)), *means, gap])
    header = ["exact match, %", "models", "first", "second", "difference, 95 % interval"]
    print(*markdown_table(header, table), sep="\n")
    same = [row["same"] for row in rows if row["case"] == "added"]
    print(
        f"\nAnswers and log-probabilities of 40 languages bit-identical: {sum(same)} of {len(same)} models."
    )


if __name__ == "__main__":
    run_main(main)
