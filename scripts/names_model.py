"""Trains the model `names` that comes with the package, and writes its folder with its card.

    python -m scripts.names_model --out runs/names_model [--resume]

Every step is a separate command; this one runs them in turn and prints each. Then it answers all names that are held
out and 2,000 that were trained on, with the 8-bit model, and counts which experts serve which language. Copy
`runs/names_model/model` to `moe/names` to ship it.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import json
import shlex
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

import stmoe
from moe.checkpoint.loading import load_model
from moe.checksums import write_sums
from moe.cli import CONTINUES, RESUME, Parser, path, run_main
from moe.commands.surgery_report import REPORT_FILE
from moe.data.names import LANGUAGES_FILE, by_family, describe_language, source_sentence
from moe.data.pair_files import Pair, read_pairs
from moe.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from moe.estimates import mean_interval
from moe.files import whole_folder, write_text
from moe.inspection.page.report_text import expert_shares
from moe.inspection.statistics.specialization import ClassTable, class_table
from moe.inspection.statistics.token_classes import domain_classes
from moe.models.card import CARD_NAME, model_card
from moe.models.modeling import STMoEForConditionalGeneration
from moe.parsing import read_json
from moe.serving.batch_generator import BatchGenerator
from moe.tracing.examples import SourceText, paired_batches
from moe.tracing.recorder import record_routing
from moe.tracing.trace import Trace
from stmoe_eval.reports.formatting import markdown_table

RECIPE = "names_all"
VOCABULARY = 7_000
LONGEST_NAME = 32  # tokens of `CODE: NAME` with its end, data.inputs_length of the recipe
LONGEST_ANSWER = 64
_BATCH = 64

COMMANDS = """
stmoe names --out {out}/names --languages all --new
stmoe tokenizer --pairs {out}/names/train.jsonl --bytes --vocab-size {vocabulary} --out {out}/tokenizer
stmoe finetune --config {recipe} --pretrained {out}/tokenizer --train {out}/names/train.jsonl \
  --dev {out}/names/dev.jsonl --out {out}/run
stmoe quantize --from {out}/run/model --to {out}/quantized --all
"""

Model = tuple[STMoEForConditionalGeneration, PreTrainedTokenizerFast]


def main(argv: list[str]) -> None:
    """Runs the commands that are not finished, and writes the model's folder."""
    parser = Parser(prog="python -m scripts.names_model", description="Trains the model of names.")
    parser.add_argument("--out", type=path, default=Path("runs/names_model"), help="folder of all")
    parser.add_argument("--resume", action="store_true", help="continue an earlier run")
    options = parser.parse_args(argv)
    out = options.out
    train(out, resume=options.resume)

    model = load_model(out / "quantized"), load_tokenizer(out / "quantized")
    sets = {name: read_pairs(out / f"names/{name}.jsonl") for name in ("test", "seen")}
    right = {name: right_answers(model, pairs) for name, pairs in sets.items()}
    experts = experts_by_language(model, sets["test"] + sets["seen"])
    described = described_languages(sets["test"], right["test"])

    with whole_folder(out / "model", kind="model") as partial:
        shutil.copytree(out / "quantized", partial, dirs_exist_ok=True)
        for name in (REPORT_FILE, "modeling_st_moe.py"):  # paths of this machine; code for the hub
            (partial / name).unlink()
        config = read_json(partial / "config.json")
        del config["auto_map"]
        write_json(partial / "config.json", config)
        settings = partial / "generation_config.json"
        write_json(settings, {**read_json(settings), "max_new_tokens": LONGEST_ANSWER})
        write_json(partial / TOKENIZER_FILE, read_json(partial / TOKENIZER_FILE))  # a third smaller
        write_json(partial / LANGUAGES_FILE, described)
        write_json(partial / "experts.json", experts)
        card = names_card(model[0], sets, right, described["languages"])
        write_text(partial / CARD_NAME, card)
        write_sums(partial)
    print(f"The model is in {out / 'model'}: copy it to moe/names.")


def train(out: Path, *, resume: bool) -> None:
    """Runs the commands whose folders are not there yet."""
    names = {"out": out, "vocabulary": VOCABULARY, "recipe": RECIPE}
    for line in COMMANDS.replace("\\\n", "").strip().splitlines():
        words = shlex.split(line.format(**names))
        folder = Path(words[words.index("--out" if "--out" in words else "--to") + 1])
        is_run = words[1] == "finetune"
        if (folder / "model" if is_run else folder).exists():
            continue
        if is_run and resume and folder.exists():
            words.append("--resume")
        print(f"\n   {shlex.join(words)}", flush=True)
        stmoe.main(words[1:])


def right_answers(model: Model, pairs: Sequence[Pair]) -> np.ndarray:
    """Returns <bool>[N]: whether greedy decoding writes exactly the target of each pair."""
    generator = BatchGenerator(*model, max_batch=_BATCH, max_new_tokens=LONGEST_ANSWER)
    answers = tqdm(generator.map(pair.inputs for pair in pairs), total=len(pairs), unit="name")
    return np.array(
        [answer.text == pair.targets for answer, pair in zip(answers, pairs, strict=True)]
    )


def trace_names(model: Model, pairs: Sequence[Pair], languages: Sequence[str]) -> Trace:
    """Returns the routing of the right answers, with languages as domains."""
    texts = [
        SourceText(*pair.texts, number, language)
        for number, (pair, language) in enumerate(zip(pairs, languages, strict=True))
    ]
    batches = paired_batches(
        texts, model[1], inputs_length=LONGEST_NAME, targets_length=LONGEST_ANSWER, batch_size=256
    )
    return record_routing(model[0], batches)


def language_tables(trace: Trace) -> list[ClassTable]:
    """Returns languages by experts for each sparse layer, in the order of the trace's domains."""
    return [class_table(layer, domain_classes(trace, layer.facts.stack)) for layer in trace.layers]


def experts_by_language(model: Model, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Returns the share of each language in the tokens of each expert, by stack and layer."""
    trace = trace_names(model, pairs, [language_of(pair) for pair in pairs])
    languages = by_family(trace.facts.domains)
    order = [trace.facts.domains.index(language) for language in languages]
    experts: dict[str, Any] = {"languages": languages, "encoder": {}, "decoder": {}}
    for table in language_tables(trace):
        stack, layer = table.layer
        shares = expert_shares(table)[:, order]  # [E, C]
        experts[stack][layer] = [[round(share, 3) or 0 for share in row] for row in shares.tolist()]
    return experts


def language_of(pair: Pair) -> str:
    """Returns the code before the name."""
    return pair.inputs.partition(":")[0]


def described_languages(pairs: Sequence[Pair], right: np.ndarray) -> dict[str, Any]:
    """Returns name, family and score of each language, as the package and the page read them."""
    right_of: dict[str, list[bool]] = defaultdict(list)
    for pair, is_right in zip(pairs, right, strict=True):
        right_of[language_of(pair)].append(is_right)
    languages = {}
    for code in by_family(right_of):
        score = round(100 * float(np.mean(right_of[code])), 1)
        languages[code] = {**describe_language(code), "score": score}
    return {"languages": languages, "longest_name": LONGEST_NAME}


def names_card(
    model: STMoEForConditionalGeneration,
    sets: dict[str, list[Pair]],
    right: dict[str, np.ndarray],
    languages: dict[str, dict[str, Any]],
) -> str:
    """Returns the card: data, licence, scores, and what the model cannot do."""
    scores = {}
    for name, answers in right.items():
        sums = np.stack([100.0 * answers, np.ones(len(answers))], axis=1)
        interval = mean_interval(sums)
        assert interval is not None, "there are many names"
        value = f"{100 * answers.mean():.1f} % ({interval.low:.1f} to {interval.high:.1f})"
        scores[name] = f"{value} of {len(answers):,}"
    numbers = Counter(map(language_of, sets["test"]))
    rows = []
    for code, language in languages.items():
        rows.append([code, *map(str, language.values()), str(numbers[code])])
    table = markdown_table(["code", "language", "family", "exact, %", "names"], rows)
    sections = {
        "Use": (
            "A text is a language's code, a colon and an English name: "
            '`stmoe generate --model names "el: New Zealand"`.'
        ),
        "Training data": (
            f"What places, languages, scripts and currencies are called in {len(rows)} languages: "
            f"{source_sentence()}. A twelfth of the names of each language is held out.\n\n"
            "Trained by `python -m scripts.names_model`, then stored in 8 bits, embeddings and dense "
            "weights too."
        ),
        "Quality": (
            "Share of answers that are exactly CLDR's, greedily decoded by these 8-bit weights "
            "(95 % intervals):\n\n"
            f"- names that were trained on, recalled: {scores['seen']}\n"
            f"- names that were never seen in that language: {scores['test']}\n\n"
            "By language, on names never seen:\n\n" + "\n".join(table)
        ),
        "Limits": (
            "It knows names of places, languages, scripts and currencies as CLDR writes them, and "
            "nothing else: it does not translate words or sentences, and names of people or small "
            "towns come out invented. Most names that it has never seen in a language are wrong, "
            "often by a letter, sometimes in another script. A proposal for a gap in CLDR needs a "
            "speaker's eye."
        ),
    }
    return model_card(
        model.config,
        license="unicode",
        language=sorted({code.partition("_")[0] for code in languages}),
        sections=sections,
    )


def write_json(path: Path, content: Any) -> None:
    """Writes a file of JSON without spaces."""
    write_text(path, json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    run_main(main, interrupted=CONTINUES if "--resume" in sys.argv else RESUME)
