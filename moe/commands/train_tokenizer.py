"""stmoe tokenizer: trains a vocabulary on a corpus or on pairs of texts.

stmoe tokenizer --corpus runs/corpus --out runs/tokenizer --vocab-size 2048
stmoe tokenizer --pairs runs/names/train.jsonl --bytes --out runs/tokenizer --vocab-size 4000
"""

from itertools import chain

from moe.cli import Parser, integer, path
from moe.data.corpus import load_corpus
from moe.data.pair_files import read_pairs
from moe.data.tokenizer import train_byte_tokenizer, train_tokenizer
from moe.files import output_path


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="stmoe tokenizer", description="Trains a vocabulary.")
    texts = parser.add_mutually_exclusive_group(required=True)
    texts.add_argument("--corpus", type=path, help="folder made by stmoe corpus")
    texts.add_argument("--pairs", type=path, help="table of pairs, as for stmoe finetune --train")
    parser.add_argument("--out", required=True, help="folder for the tokenizer")
    parser.add_argument(
        "--vocab-size",
        type=integer(),
        default=2048,
        help="pieces, the 100 sentinels included (default 2048)",
    )
    parser.add_argument(
        "--bytes",
        action="store_true",
        help="byte-level BPE instead of SentencePiece's unigrams, for many scripts: no character is unknown",
    )
    return parser


def main(argv: list[str]) -> None:
    """Trains and saves a tokenizer."""
    options = build_parser().parse_args(argv)
    source = options.corpus or options.pairs
    out = output_path(options.out, inputs=[source])

    # The vocabulary is learned from the training text only.
    if options.corpus:
        texts = load_corpus(options.corpus).train["text"]
    else:
        texts = list(chain.from_iterable(pair.texts for pair in read_pairs(options.pairs)))
    train = train_byte_tokenizer if options.bytes else train_tokenizer
    tokenizer = train(texts, options.vocab_size, out)
    print(
        f"A vocabulary of {len(tokenizer):,} is in {out}; AutoTokenizer.from_pretrained loads it."
    )
