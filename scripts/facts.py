"""Writes facts to learn by heart, random and real ones, and sums modulo a prime, as pairs of texts.

    python -m scripts.facts --facts 10000 --seed 0 --out runs/studies/facts

The folder holds `facts.jsonl`, `sums.jsonl`, `sums_dev.jsonl`, and `model`: a tokenizer of whole
symbols beside an untrained model. `real.jsonl` holds facts of this Python installation, and
`real_model` a tokenizer for them. `stmoe finetune --pretrained FOLDER/model --init scratch` trains
fresh weights of any architecture on them, as recipes/studies/knowledge_capacity.yaml does.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moe.cli import Parser, integer, run_main
from moe.data.tokenizer import EOS, PAD, UNK, end_with_sentinel, sentinel
from moe.files import output_path, register_folder_kind, whole_folder
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration
from scripts.real_facts import real_facts, train_pieces

CONSONANTS = list("bcdfghjklmnprstv")
VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "oo", "ar", "er", "ir", "or", "ur", "an", "en", "in"]
SYLLABLES = [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]
SYMBOLS = 3
"""Syllables of a question, and of its answer: an answer has 3 · 8 bits."""

PRIME = 997
"""Numbers below it are added, modulo it."""
SUMS = 20_000
DEV_SUMS = 2_000

FACTS = register_folder_kind(
    "facts",
    markers=["facts.jsonl"],
    parts=["facts.jsonl", "sums.jsonl", "sums_dev.jsonl", "model", "real.jsonl", "real_model"],
)


def main(argv: list[str]) -> None:
    """Writes the folder."""
    parser = Parser(prog="python -m scripts.facts", description="Writes facts and sums to learn.")
    most = len(SYLLABLES) ** SYMBOLS
    parser.add_argument(
        "--facts", type=integer(least=1, most=most), default=10_000, help="number of facts (10000)"
    )
    parser.add_argument("--seed", type=integer(least=0), default=0, help="seed of the facts (0)")
    default = "runs/studies/facts"
    parser.add_argument("--out", default=default, help=f"folder to write ({default})")
    options = parser.parse_args(argv)

    out = output_path(options.out)
    sums = draw_sums(SUMS + DEV_SUMS, options.seed)
    real = real_facts()
    with whole_folder(out, kind=FACTS) as partial:
        write_pairs(partial / "facts.jsonl", draw_facts(options.facts, options.seed))
        write_pairs(partial / "sums.jsonl", sums[:SUMS])
        write_pairs(partial / "sums_dev.jsonl", sums[SUMS:])
        save_model(partial / "model", symbol_tokenizer())
        write_pairs(partial / "real.jsonl", real)
        save_model(partial / "real_model", train_pieces(real))
    counts = f"{options.facts:,} random facts, {len(real):,} real ones and {len(sums):,} sums"
    print(f"Wrote {counts} to {out}.")


def draw_facts(num_facts: int, seed: int) -> list[tuple[str, str]]:
    """Returns different questions with independent answers, uniform over all texts of three syllables.

    Source:
        Physics of Language Models 3.3 (arXiv:2404.05405) for counting what a model knows in bits.
    """
    random = np.random.default_rng(seed)
    base = len(SYLLABLES)
    questions = random.choice(base**SYMBOLS, num_facts, replace=False)
    answers = random.integers(base**SYMBOLS, size=num_facts)
    return [
        (_spell(int(question)), _spell(int(answer)))
        for question, answer in zip(questions, answers, strict=True)
    ]


def _spell(number: int) -> str:
    """Returns a number in syllables."""
    digits = np.unravel_index(number, (len(SYLLABLES),) * SYMBOLS)
    return " ".join(SYLLABLES[int(digit)] for digit in digits)


def draw_sums(num_sums: int, seed: int) -> list[tuple[str, str]]:
    """Returns different pairs of numbers below `PRIME` with their sum modulo it, in digits.

    With the most significant digit first, a dense model of 232k parameters computes 0 % of them after
    400 updates; with the least significant first 98.8 % after 1,500.
    """
    random = np.random.default_rng(seed)
    pairs: list[tuple[str, str]] = []
    for index in random.choice(PRIME**2, num_sums, replace=False):
        left, right = divmod(int(index), PRIME)
        pairs.append((f"{_digits(left)} + {_digits(right)}", _digits((left + right) % PRIME)))
    return pairs


def _digits(number: int) -> str:
    """Returns the three digits of a number, the least significant first, as sums are computed."""
    return " ".join(reversed(f"{number:03}"))


def write_pairs(path: Path, pairs: Sequence[tuple[str, str]]) -> None:
    """Writes pairs of texts as lines of JSON, as `stmoe finetune --train` reads them."""
    with path.open("w", encoding="utf-8") as file:
        for inputs, targets in pairs:
            file.write(json.dumps({"inputs": inputs, "targets": targets}) + "\n")


def symbol_tokenizer() -> Tokenizer:
    """Returns a tokenizer with one token for each symbol of random facts and sums.

    A symbol is a word, marked as SentencePiece does, so that the model can be inspected.
    """
    words = [f"▁{symbol}" for symbol in [*"0123456789+", *SYLLABLES]]
    vocabulary = {piece: index for index, piece in enumerate([PAD, EOS, UNK, *words, sentinel(0)])}
    symbols = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    symbols.pre_tokenizer = pre_tokenizers.Metaspace()
    symbols.decoder = decoders.Metaspace()
    return symbols


def save_model(folder: Path, symbols: Tokenizer) -> None:
    """Saves a tokenizer, and an untrained dense model of its vocabulary."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=symbols,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=[sentinel(0)],
    )
    config = STMoEConfig(
        vocab_size=symbols.get_vocab_size(),
        d_model=64,
        d_kv=32,
        num_heads=2,
        d_ff=128,
        num_layers=2,
        num_experts=0,
        num_sparse_encoder_layers=0,
        num_sparse_decoder_layers=0,
    )
    STMoEForConditionalGeneration(config).save_pretrained(folder)
    end_with_sentinel(tokenizer, has_sentinel=False).save_pretrained(str(folder))


if __name__ == "__main__":
    run_main(main)
