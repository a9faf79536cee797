"""Builds a corpus: the English in this Python installation, or your own text.

python -m scripts.build_corpus --out runs/corpus
python -m scripts.build_corpus --out runs/corpus --data my.txt more.jsonl folder/
python -m scripts.build_corpus --out runs/corpus --unseen docstring_summary
"""

if __name__ == "__main__":  # before the imports that take seconds
    from eval.start import answer_interrupts

    answer_interrupts()

from eval.task import TASKS
from moe.cli import Parser, integer, path, real, run_main, word
from moe.data.corpus import build_corpus, corpus_table, save_corpus
from moe.data.documents import read_files, read_python_corpus
from moe.files import check_replaceable, output_path


def tested_files(task: str) -> set[str]:
    """Returns the files that the validation and test examples of a task are from."""
    return {
        example.group
        for split in ("validation", "test")
        for example in TASKS.get(task).examples(split)
    }


def main(argv: list[str]) -> None:
    """Builds, saves and describes a corpus."""
    parser = Parser(prog="python -m scripts.build_corpus", description="Builds a corpus.")
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
    parser.add_argument(
        "--unseen", type=word, help="task of eval/ whose validation and test files are left out"
    )
    arguments = parser.parse_args(argv)
    out = output_path(arguments.out, inputs=arguments.data or ())
    check_replaceable(out, kind="corpus")  # before the work, not after

    documents = read_files(arguments.data) if arguments.data else read_python_corpus()
    sources = tested_files(arguments.unseen) if arguments.unseen else set()
    corpus = build_corpus(documents, arguments.held_out, arguments.seed, leave_out=sources)
    save_corpus(corpus, out)
    print(corpus_table(corpus))
    print(f"{corpus.num_repeated:,} repeated paragraphs were left out. The corpus is in {out}.")


if __name__ == "__main__":
    run_main(main)
