"""stmoe tokenizer: trains a SentencePiece vocabulary on a corpus.

stmoe tokenizer --corpus runs/corpus --out runs/tokenizer --vocab-size 2048
"""

from moe.cli import Parser, integer, path
from moe.data.corpus import load_corpus
from moe.data.tokenizer import train_tokenizer
from moe.files import output_path


def build_parser() -> Parser:
    """Returns what reads the command line."""
    parser = Parser(prog="stmoe tokenizer", description="Trains a vocabulary.")
    explanation = "folder made by stmoe corpus"
    parser.add_argument("--corpus", type=path, required=True, help=explanation)
    parser.add_argument("--out", required=True, help="folder for the tokenizer")
    explanation = "pieces, with 100 sentinels (default 2048)"
    parser.add_argument("--vocab-size", type=integer(), default=2048, help=explanation)
    return parser


def main(argv: list[str]) -> None:
    """Trains and saves a tokenizer."""
    options = build_parser().parse_args(argv)
    out = output_path(options.out, inputs=[options.corpus])

    # The vocabulary is learnt from training text alone.
    corpus = load_corpus(options.corpus)
    tokenizer = train_tokenizer(corpus.train["text"], options.vocab_size, out)
    size = len(tokenizer)
    print(f"A vocabulary of {size:,} is in {out}; AutoTokenizer.from_pretrained loads it.")
