"""stmoe corpus: builds a corpus from your own text, or from the English in this Python installation.

stmoe corpus --out runs/corpus
stmoe corpus --out runs/corpus --data my.txt more.jsonl folder/
"""

from collections.abc import Callable

from moe.cli import Parser, integer, path, real, word
from moe.data.corpus import build_corpus, corpus_table, save_corpus
from moe.data.documents import read_files, read_python_corpus
from moe.files import check_replaceable, output_path

EvaluationFiles = Callable[[str], set[str]]
"""Returns the source files from which a task's validation and test examples are made."""


def build_parser(*, has_tasks: bool) -> Parser:
    """Returns what reads the command line; `--unseen` needs the tasks of the repository."""
    parser = Parser(prog="stmoe corpus", description="Builds a corpus.")
    parser.add_argument("--out", required=True, help="folder for the corpus")
    parser.add_argument(
        "--data", type=path, nargs="+", help="your .txt, .md or .jsonl files, or folders of them"
    )
    parser.add_argument(
        "--held-out",
        type=real(above=0, below=1),
        default=0.05,
        help="share of documents held out (default 0.05)",
    )
    parser.add_argument(
        "--seed", type=integer(), default=0, help="another seed holds out other documents"
    )
    if has_tasks:
        parser.add_argument(
            "--unseen", type=word, help="task of eval/ whose validation and test files are left out"
        )
    return parser


def main(argv: list[str], evaluation_files: EvaluationFiles | None = None) -> None:
    """Builds, saves and describes a corpus.

    Args:
        argv: The command line, without the program.
        evaluation_files: Files of a task by its name, for `--unseen`; None where no task is known.
    """
    parser = build_parser(has_tasks=evaluation_files is not None)
    options = parser.parse_args(argv)
    out = output_path(options.out, inputs=options.data or ())
    check_replaceable(out, kind="corpus")  # before the work, not after

    # Text that a task is evaluated on must not be trained on.
    unseen_files: set[str] = set()
    if evaluation_files is not None and options.unseen:
        unseen_files = evaluation_files(options.unseen)

    documents = read_files(options.data) if options.data else read_python_corpus()
    corpus = build_corpus(documents, options.held_out, options.seed, leave_out=unseen_files)
    save_corpus(corpus, out)

    print(corpus_table(corpus))
    print(f"{corpus.num_repeated:,} repeated paragraphs were left out. The corpus is in {out}.")
