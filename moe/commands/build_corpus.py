"""stmoe corpus: builds a corpus from your own text, or from the English on this machine.

stmoe corpus --out runs/corpus
stmoe corpus --out runs/corpus --data my.txt more.jsonl folder/
stmoe corpus --out runs/corpus --packages stdlib numpy ./unpacked-1.0 --wordnet --dictionary
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from moe.cli import Parser, integer, path, real, word
from moe.data.corpus import build_corpus, corpus_table, save_corpus
from moe.data.dictionary import find_dictionary, read_dictionary
from moe.data.documents import Document, read_files
from moe.data.packages import read_packages, read_python_corpus
from moe.data.wordnet import find_wordnet, read_synsets, wordnet_documents
from moe.files import check_replaceable, output_path

EvaluationFiles = Callable[[str], set[str]]
"""Returns the source files from which a task's validation and test examples are made."""


def build_parser(*, has_tasks: bool) -> Parser:
    """Returns what reads the command line; `--unseen` needs the tasks of the repository."""
    parser = Parser(
        prog="stmoe corpus",
        description=(
            "Builds a corpus of all sources that are named together; of the docstrings of the "
            "standard library, torch and numpy when none is."
        ),
    )
    parser.add_argument("--out", required=True, help="folder for the corpus")

    # Sources of text.
    parser.add_argument(
        "--data", type=path, nargs="+", help="your .txt, .md, .rst or .jsonl files, or folders"
    )
    parser.add_argument(
        "--packages",
        type=word,
        nargs="+",
        help="docstrings and pages of installed packages (stdlib is one), or of folders of sources",
    )
    explanation = "WordNet's definitions and examples: the system's, or those in a folder"
    parser.add_argument(
        "--wordnet", type=path, nargs="?", const=True, metavar="FOLDER", help=explanation
    )
    explanation = "a dictionary of dictd: the system's GCIDE, or an .index file"
    parser.add_argument(
        "--dictionary", type=path, nargs="?", const=True, metavar="FILE", help=explanation
    )

    # What of them.
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
    inputs = [*(options.data or ()), _given(options.wordnet), _given(options.dictionary)]
    out = output_path(options.out, inputs=inputs)
    check_replaceable(out, kind="corpus")  # before the work, not after

    # Text that a task is evaluated on must not be trained on.
    unseen_files: set[str] = set()
    if evaluation_files is not None and options.unseen:
        unseen_files = evaluation_files(options.unseen)

    documents = read_sources(options)
    corpus = build_corpus(documents, options.held_out, options.seed, leave_out=unseen_files)
    save_corpus(corpus, out)

    print(corpus_table(corpus))
    print(f"{corpus.num_repeated:,} repeated paragraphs were left out. The corpus is in {out}.")


def read_sources(options: argparse.Namespace) -> list[Document]:
    """Returns the documents of all sources that the command line names.

    Of equal paragraphs the first stays, so the order decides to which source they count.
    """
    documents: list[Document] = []
    if options.packages:
        documents += read_packages(options.packages)
    if options.wordnet:
        folder = find_wordnet(_given(options.wordnet))
        documents += wordnet_documents(read_synsets(folder))
    if options.dictionary:
        documents += read_dictionary(find_dictionary(_given(options.dictionary)))
    if options.data:
        documents += read_files(options.data)
    return documents or read_python_corpus()


def _given(option: Path | bool | None) -> Path | None:
    """Returns the path that is given with an option; None where the option stands alone."""
    return option if isinstance(option, Path) else None
