"""stmoe corpus: builds a corpus from your own text, or from the English on this machine.

stmoe corpus --out runs/corpus
stmoe corpus --out runs/corpus --data my.txt more.jsonl folder/

In the repository it also reads other packages, WordNet and dictionaries:

stmoe corpus --out runs/corpus --packages stdlib numpy ./unpacked-1.0 --wordnet --dictionary
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from moe.cli import Parser, integer, path, real, word
from moe.data.corpus import Corpus, build_corpus, corpus_table, markdown_table, save_corpus
from moe.data.docstrings import read_python_corpus
from moe.data.documents import TEXT_COLUMN, Document, read_files
from moe.data.overlap import SplitOverlap, measure_overlap
from moe.files import check_replaceable, output_path


class UnseenTask(NamedTuple):
    """Examples of a task that must be excluded from training.

    Attributes:
        name: Name of the task.
        sources: Sources of the documents used for its validation and test examples.
        inputs: Inputs of these examples, by split.
    """

    name: str
    sources: set[str]
    inputs: Mapping[str, Sequence[str]]


class RepositoryReaders(NamedTuple):
    """Readers of the repository, which an installed wheel does not have.

    Attributes:
        unseen_task: Returns the unseen examples of a task, given its name.
        packages: Returns the documents of packages, given their names.
        wordnet: Returns the documents of WordNet in a folder; None for the system's.
        dictionary: Returns the documents of a dictionary; None for the system's.
    """

    unseen_task: Callable[[str], UnseenTask]
    packages: Callable[[Sequence[str]], list[Document]]
    wordnet: Callable[[Path | None], list[Document]]
    dictionary: Callable[[Path | None], list[Document]]


def build_parser(*, in_repository: bool) -> Parser:
    """Returns the parser; some options need the repository, see `RepositoryReaders`."""
    parser = Parser(
        prog="stmoe corpus",
        description=(
            "Builds a corpus from all given sources; without any, from the docstrings of the "
            "standard library, torch and numpy."
        ),
    )
    parser.add_argument("--out", required=True, help="folder for the corpus")

    # Sources of text.
    parser.add_argument(
        "--data",
        type=path,
        nargs="+",
        help="your .txt, .md, .rst, .jsonl, .csv, .tsv or .parquet files, or folders",
    )
    parser.add_argument(
        "--column", type=word, default=TEXT_COLUMN, help="column of the texts in tables (text)"
    )

    # Documents that are held out, and documents that are left out.
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
    parser.set_defaults(packages=None, wordnet=None, dictionary=None, unseen=None)
    if not in_repository:
        return parser

    # Sources and tasks of the repository.
    parser.add_argument(
        "--packages",
        type=word,
        nargs="+",
        help="docstrings and pages of installed packages (stdlib is one), or of folders of sources",
    )
    parser.add_argument(
        "--wordnet",
        type=path,
        nargs="?",
        const=True,
        metavar="FOLDER",
        help="WordNet's definitions and examples: the system's, or those in a folder",
    )
    parser.add_argument(
        "--dictionary",
        type=path,
        nargs="?",
        const=True,
        metavar="FILE",
        help="a dictionary of dictd: the system's GCIDE, or an .index file",
    )
    parser.add_argument(
        "--unseen",
        type=word,
        nargs="+",
        metavar="TASK",
        help="tasks of eval/ whose validation and test examples are left out",
    )
    return parser


def main(argv: list[str], readers: RepositoryReaders | None = None) -> None:
    """Builds, saves and describes a corpus.

    Args:
        argv: The command line, without the program.
        readers: Readers of the repository; None in an installed wheel.
    """
    options = build_parser(in_repository=readers is not None).parse_args(argv)
    inputs = [*(options.data or ()), _given(options.wordnet), _given(options.dictionary)]
    inputs += [Path(name) for name in options.packages or () if "/" in name]
    out = output_path(options.out, inputs=inputs)
    check_replaceable(out, kind="corpus")  # before the work, not after

    # Text that tasks are evaluated on must not be trained on.
    tasks: list[UnseenTask] = []
    if readers is not None:
        tasks = [readers.unseen_task(name) for name in dict.fromkeys(options.unseen or ())]
    documents = read_sources(options, readers)

    # Only sources that were given can be left out.
    sources = {document.source for document in documents}
    unseen_sources: set[str] = set()
    unseen_inputs: list[Sequence[str]] = []
    for task in tasks:
        unseen_sources |= task.sources & sources
        unseen_inputs += task.inputs.values()

    corpus = build_corpus(
        documents,
        options.held_out,
        options.seed,
        leave_out=unseen_sources,
        unseen_inputs=unseen_inputs,
    )

    # Check the finished text for content that should be left out.
    overlaps = split_overlaps(corpus, tasks)
    save_corpus(corpus, out, overlaps)

    print(corpus_table(corpus))
    print(f"{corpus.num_repeated:,} repeated paragraphs were left out. The corpus is in {out}.")
    for task in tasks:
        num_sources = len(task.sources & sources)
        print(f"{task.name}: {num_sources:,} of its {len(task.sources):,} sources were left out.")
    if tasks:
        print(f"{corpus.num_quoting:,} paragraphs that quote their examples were left out too.")
        print(overlap_table(overlaps))


def split_overlaps(corpus: Corpus, tasks: Sequence[UnseenTask]) -> list[SplitOverlap]:
    """Returns how much of the tasks' inputs occurs in the training text."""
    if not tasks:
        return []

    # One pass over the text for all tasks and splits.
    inputs = {}
    for task in tasks:
        for split, texts in task.inputs.items():
            inputs[task.name, split] = texts

    overlaps = []
    for (name, split), measured in measure_overlap(inputs, corpus.train["text"]).items():
        for overlap in measured:
            overlaps.append(SplitOverlap.of(name, split, overlap))
    return overlaps


def overlap_table(overlaps: Sequence[SplitOverlap]) -> str:
    """Returns a Markdown table of the n-grams that test examples share with the training text."""
    header = ["task", "split", "n", "examples", "compared", "with a shared n-gram"]
    rows: list[list[str | int]] = []
    for overlap in overlaps:
        rows.append(
            [
                overlap.task,
                overlap.split,
                overlap.n,
                overlap.num_inputs,
                overlap.num_compared,
                overlap.num_shared,
                f"{100 * overlap.share_of_inputs:.1f} %",
                overlap.num_ngrams,
                f"{100 * overlap.share_of_ngrams:.2f} %",
            ]
        )
    return markdown_table([*header, "share", "n-grams", "share shared"], rows)


def read_sources(options: argparse.Namespace, readers: RepositoryReaders | None) -> list[Document]:
    """Returns the documents of all given sources.

    The first of equal paragraphs is kept, so the order determines the source that it is counted
    for.
    """
    documents: list[Document] = []
    if readers is not None:
        if options.packages:
            documents += readers.packages(options.packages)
        if options.wordnet:
            documents += readers.wordnet(_given(options.wordnet))
        if options.dictionary:
            documents += readers.dictionary(_given(options.dictionary))
    if options.data:
        documents += read_files(options.data, options.column)
    return documents or read_python_corpus()


def _given(option: Path | bool | None) -> Path | None:
    return option if isinstance(option, Path) else None
