"""stmoe tokenizer: trains a SentencePiece vocabulary on a corpus.

stmoe tokenizer --corpus runs/corpus --out runs/tokenizer --vocab-size 2048
"""

from moe.cli import Parser, integer, path
from moe.data.corpus import load_corpus
from moe.data.tokenizer import train_tokenizer
from moe.files import output_path


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="stmoe tokenizer", description="Trains a vocabulary.")
    parser.add_argument("--corpus", type=path, required=True, help="folder made by stmoe corpus")
    parser.add_argument("--out", required=True, help="folder for the tokenizer")
    parser.add_argument(
        "--vocab-size",
        type=integer(),
        default=2048,
        help="pieces, the 100 sentinels included (default 2048)",
    )
    return parser


def main(argv: list[str]) -> None:
    """Trains and saves a tokenizer."""
    options = build_parser().parse_args(argv)
    out = output_path(options.out, inputs=[options.corpus])

    # The vocabulary is learned from the training text only.
    corpus = load_corpus(options.corpus)
    tokenizer = train_tokenizer(corpus.train["text"], options.vocab_size, out)
    print(
        f"A vocabulary of {len(tokenizer):,} is in {out}; AutoTokenizer.from_pretrained loads it."
    )
