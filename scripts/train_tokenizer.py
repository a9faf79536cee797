"""Trains a SentencePiece vocabulary on a corpus: `stmoe tokenizer`. See moe/commands/train_tokenizer.py.

python -m scripts.train_tokenizer --corpus runs/corpus --out runs/tokenizer --vocab-size 2048
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

from moe.cli import run_main
from moe.commands.train_tokenizer import main

if __name__ == "__main__":
    run_main(main)
