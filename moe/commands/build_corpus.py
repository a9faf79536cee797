"""stmoe corpus: builds a corpus from your own text.

stmoe corpus --out runs/corpus --data my.txt more.jsonl folder/
"""

from moe.cli import Parser, integer, path, real, word
from moe.data.corpus import CORPUS_HEADER, build_corpus, corpus_rows, save_corpus
from moe.data.documents import TEXT_COLUMN, read_files
from moe.files import check_replaceable, output_path
from moe.inspection.tables import format_table


def build_parser() -> Parser:
    """Returns the parser of the command."""
    parser = Parser(prog="stmoe corpus", description="Builds a corpus from all given sources.")
    parser.add_argument("--out", required=True, help="folder for the corpus")
    parser.add_argument(
        "--data",
        type=path,
        nargs="+",
        required=True,
        help="your .txt, .md, .rst, .jsonl, .csv, .tsv or .parquet files, or folders",
    )
    parser.add_argument(
        "--column", type=word, default=TEXT_COLUMN, help="column of the texts in tables (text)"
    )
    parser.add_argument(
        "--held-out",
        type=real(above=0, below=1),
        default=0.05,
        help="fraction of documents held out (default 0.05)",
    )
    parser.add_argument(
        "--seed",
        type=integer(),
        default=0,
        help="seed of the choice of held-out documents (default 0)",
    )
    return parser


def main(argv: list[str]) -> None:
    """Builds, saves and describes a corpus."""
    options = build_parser().parse_args(argv)
    out = output_path(options.out, inputs=options.data)
    check_replaceable(out, kind="corpus")  # before the work, not after

    documents = read_files(options.data, options.column)
    corpus = build_corpus(documents, options.held_out, options.seed)
    save_corpus(corpus, out)
    cells = []
    for row in corpus_rows(corpus):
        cells.append([f"{value:,}" if isinstance(value, int) else value for value in row])
    print(format_table(CORPUS_HEADER, cells))
    print(f"{corpus.num_repeated:,} repeated paragraphs were left out. The corpus is in {out}.")
