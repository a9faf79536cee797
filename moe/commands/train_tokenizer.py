"""stmoe tokenizer: trains a SentencePiece vocabulary on a corpus.

stmoe tokenizer --corpus runs/corpus --out runs/tokenizer --vocab-size 2048
"""

from moe.cli import Parser, integer, path
from moe.data.corpus import load_corpus
from moe.data.tokenizer import train_tokenizer
from moe.files import output_path


def main(argv: list[str]) -> None:
    """Trains and saves a tokenizer."""
    parser = Parser(prog="stmoe tokenizer", description="Trains a vocabulary.")
    parser.add_argument(
        "--corpus", type=path, required=True, help="folder made by scripts.build_corpus"
    )
    parser.add_argument("--out", required=True, help="folder for the tokenizer")
    parser.add_argument(
        "--vocab-size",
        type=integer(),
        default=2048,
        help="pieces, with 100 sentinels (default 2048)",
    )
    arguments = parser.parse_args(argv)
    out = output_path(arguments.out, inputs=[arguments.corpus])

    corpus = load_corpus(arguments.corpus)
    tokenizer = train_tokenizer(corpus.train["text"], arguments.vocab_size, out)
    print(
        f"A vocabulary of {len(tokenizer):,} is in {out}; AutoTokenizer.from_pretrained loads it."
    )
