"""What full fine-tuning and adapters learn of Latin, forget of 157 other languages, and cost.

    python -m scripts.adapters_study --out runs/adapters

The model `names` has never seen Latin: CLDR has only 413 of its names. Every run is a process of its own and a
line of `runs.jsonl`; a second call makes those that are missing. The rate of a way is the best of RATES on the dev
names, mean of SEEDS; 4 bits take the rate of floats. Time and memory are also those of a larger model, with 64 experts
in each of two layers (201M of its 216M parameters).

Declared before the first run: *both* against *full*, exact match on the new language's test names, three seeds, paired
t interval, equal within 3 points. Expected: not shown, both 0 to 6 points behind; experts alone before attention
alone; 4 bits within 2 points of floats; every way forgets most of the old languages, experts alone least. A pilot on
another new language (Walser, one seed, 80 steps at a rate of 3e-3) had 34 % for full, 28 for both, 26 on 4 bits, 29 for
experts and 25 for attention, and 5, 6, 6, 25 and 6 % on the old languages. A rate of 3e-4 was left out after one run of
full fine-tuning, which had 16 % of the Latin names.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import gc
import random
import re
import statistics
import time
from collections.abc import Sequence
from itertools import product
from multiprocessing import get_context
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch.optim.lr_scheduler import LambdaLR

import moe.data.names
import stmoe
from moe import STMoEConfig, STMoEForConditionalGeneration, lora_config
from moe.checkpoint.loading import load_model
from moe.cli import CONTINUES, Parser, path, run_main
from moe.data.names import LANGUAGES_FILE, read_names
from moe.data.pair_files import Pair
from moe.data.tokenizer import load_tokenizer
from moe.files import find_model
from moe.json_lines import JsonLines
from moe.parsing import read_json, read_json_lines
from scripts.names_model import right_answers
from stmoe_eval.reports.formatting import markdown_table
from stmoe_eval.studies.seeds import equivalence_p, paired_difference

WAYS: dict[str, dict[str, bool] | None] = {
    "full": None,
    "attention": {"experts": False},
    "experts": {"attention": False},
    "both": {},
    "both, 4 bits": {},
}
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
SEEDS = (0, 1, 2)
STEPS, WARM_UP, BATCH = 120, 10, 32
LARGE_STEPS = 6
NEW, LEAST_NAMES = "la", 400  # of 413 names
NUM_TRAIN, NUM_DEV, NUM_OLD = 200, 60, 1_000

Run = tuple[str, str, float, int]
"""The model, `names` or `large`, a way, the learning rate and the seed."""

Numbers = dict[Run, dict[str, Any]]


def main(argv: list[str]) -> None:
    """Makes the runs that are missing, and prints the table."""
    parser = Parser(prog="python -m scripts.adapters_study", description="Adapters for Latin.")
    parser.add_argument("--out", type=path, default=Path("runs/adapters"), help="folder of all")
    out = parser.parse_args(argv).out
    sizes = {"d_model": 512, "d_ff": 1024, "num_layers": 2, "num_experts": 64}
    sparse = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    if not (out / "large").exists():
        config = STMoEConfig(vocab_size=7_000, **sizes, **sparse)
        STMoEForConditionalGeneration(config).save_pretrained(out / "large")
    for model, source in {"names": "names", "large": str(out / "large")}.items():
        if not (out / f"{model}-4-bits").exists():
            target = str(out / f"{model}-4-bits")
            stmoe.main(["quantize", "--from", source, "--to", target, "--bits", "4"])

    # The best rates on dev names, then 4 bits at the rate of floats, then the larger model.
    floats = [way for way in WAYS if "4 bits" not in way]
    rounds = product(SEEDS, floats, RATES)
    numbers = make(out, [("names", way, rate, seed) for seed, way, rate in rounds])
    rates: dict[str, float] = {}
    for way in WAYS:
        same = way.removesuffix(", 4 bits")
        dev = {r: sum(numbers["names", same, r, seed]["dev"] for seed in SEEDS) for r in RATES}
        rates[way] = max(RATES, key=dev.__getitem__)
    make(out, [("names", way, rates[way], seed) for way, seed in product(WAYS, SEEDS)])
    numbers = make(out, [("large", way, RATES[0], seed) for seed, way in product(SEEDS, WAYS)])
    print_table(numbers, rates)


def make(out: Path, runs: Sequence[Run]) -> Numbers:
    """Makes the runs that are missing, saves each as a line, and returns all that are complete."""
    lines = JsonLines(out / "runs.jsonl")
    numbers: Numbers = {}
    for _, line in read_json_lines(lines.path):
        numbers[line["model"], line["way"], line["rate"], line["seed"]] = line
    missing = [run for run in runs if run not in numbers]
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for line in pool.imap(learn, [(out, run) for run in missing]):
            print(line, flush=True)
            lines.append(line)
    return make(out, []) if missing else numbers


def learn(task: tuple[Path, Run]) -> dict[str, Any]:
    """Trains a model one way, and returns what it cost and, of `names`, exact matches in %."""
    out, (kind, way, rate, seed) = task
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    folder = {"names": find_model("names"), "large": out / "large"}[kind]
    if "4 bits" in way:
        folder = out / f"{kind}-4-bits"
    model = load_model(folder, dropout_rate=0.1, expert_dropout_rate=0.2)
    adapters = WAYS[way]
    if adapters is not None:
        get_peft_model(model, lora_config(model, **adapters))  # changes the model
    tokenizer = load_tokenizer(find_model("names"))
    sets = names()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    steps = STEPS if kind == "names" else LARGE_STEPS
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, 2 - 2 * step / steps, 1))

    def draw_batch() -> Any:
        inputs, targets = zip(*draw.sample(sets["train"], BATCH), strict=True)
        batch = tokenizer(inputs, text_target=targets, padding=True, return_tensors="pt")
        batch["labels"].masked_fill_(batch["labels"] == tokenizer.pad_token_id, -100)
        return batch

    # Memory is the peak from here on, over the loaded model and what torch imports and sets up at first.
    draw = random.Random(seed)
    model.train()
    model(**draw_batch()).loss.backward()
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()
    optimizer.zero_grad()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    loaded = memory("VmRSS")
    seconds = []
    for _ in range(steps):
        batch = draw_batch()
        start = time.process_time()
        model(**batch).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
    line = {"model": kind, "way": way, "rate": rate, "seed": seed}
    line |= {"parameters": sum(parameter.numel() for parameter in parameters)}
    line |= {"seconds": statistics.median(seconds), "megabytes": memory("VmHWM") - loaded}
    for key, texts in sets.items() if kind == "names" else ():
        right = right_answers((model.eval(), tokenizer), [Pair(*pair) for pair in texts])
        line[key] = 100 * float(right.mean())
    return line


def names() -> dict[str, list[tuple[str, str]]]:
    """Returns the names of the new language, and some of the old ones that were never trained on."""
    moe.data.names.LEAST_NAMES = LEAST_NAMES
    codes = read_json(Path(find_model("names")) / LANGUAGES_FILE)["languages"]
    new, old = read_names([NEW]), read_names(list(codes), "test")
    first, second = NUM_TRAIN, NUM_TRAIN + NUM_DEV
    new.sort(key=attrgetter("place"))  # as if drawn
    old.sort(key=attrgetter("place"))
    sets = {
        "train": new[:first],
        "dev": new[first:second],
        "test": new[second:],
        "old": old[:NUM_OLD],
    }
    return {key: [(name.inputs, name.name) for name in part] for key, part in sets.items()}


def memory(field: str) -> float:
    """Returns resident MB of this process: VmRSS now, VmHWM at most."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(rf"{field}:\s*(\d+) kB", status)[0]) / 1e3


def print_table(numbers: Numbers, rates: dict[str, float]) -> None:
    """Prints quality and cost of each way at its rate, and the declared comparison."""

    def of(way: str, key: str, model: str = "names") -> list[float]:
        rate = rates[way] if model == "names" else RATES[0]
        return [numbers[model, way, rate, seed][key] for seed in SEEDS]

    rows: list[list[str]] = []
    for way in WAYS:
        row = [way, f"{rates[way]:g}", f"{of(way, 'parameters')[0]:,}"]
        for key in ("train", "test", "old"):
            row.append(f"{paired_difference(of(way, key), [0.0] * len(SEEDS)):.1f}")
        row.append(f"{paired_difference(of(way, 'test'), of('full', 'test')):+.1f}")
        for model, key in product(("names", "large"), ("seconds", "megabytes")):
            row.append(f"{statistics.mean(of(way, key, model)):.3g}")
        rows.append(row)
    header = ["way", "rate", "parameters", "trained on, %", "new, %", "old, %", "minus full"]
    print(*markdown_table([*header, "s", "MB", "s, large", "MB, large"], rows), sep="\n")
    p = equivalence_p(of("both", "test"), of("full", "test"), 3.0)
    print(f"both and full differ by 3 points or more: p = {p:.3f}")


if __name__ == "__main__":
    run_main(main, interrupted=CONTINUES)
