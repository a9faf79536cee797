"""Trains a SentencePiece vocabulary on a corpus.

python -m scripts.train_tokenizer --corpus runs/corpus --out runs/tokenizer --vocab-size 2048
"""

import argparse
from pathlib import Path

from moe.data.corpus import load_corpus
from moe.data.tokenizer import train_tokenizer
from moe.errors import run_main


def main(argv: list[str]) -> None:
    """Trains and saves a tokenizer."""
    parser = argparse.ArgumentParser(prog="python -m scripts.train_tokenizer", description="Trains a vocabulary.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder made by scripts.build_corpus")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tokenizer")
    parser.add_argument("--vocab-size", type=int, default=2048, help="pieces, with 100 sentinels (default 2048)")
    arguments = parser.parse_args(argv)

    corpus = load_corpus(arguments.corpus)
    tokenizer = train_tokenizer(corpus.train["text"], arguments.vocab_size, arguments.out)
    print(f"A vocabulary of {len(tokenizer):,} is in {arguments.out}; AutoTokenizer.from_pretrained loads it.")


if __name__ == "__main__":
    run_main(main)
