"""Measures how the sparse models of a study route sentinels, over its seeds.

python -m scripts.sentinels runs/studies/sparse_against_dense --corpus runs/studies/corpus
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import shlex

from eval.studies.report import result_lines, write_report
from eval.studies.sentinel_entropy import NAME, sentinel_result
from moe.cli import Parser, integer, path, run_main, word
from moe.files import claim_folder, output_path
from moe.training.job_folder import JOB


def main(argv: list[str]) -> None:
    """Traces the models, writes the report and prints its tables."""
    parser = Parser(prog="python -m scripts.sentinels", description="Measures paths of sentinels.")
    parser.add_argument("study", type=path, help="folder of a study of pre-training")
    parser.add_argument(
        "--corpus", type=path, required=True, help="text whose held-out part is traced"
    )
    parser.add_argument("--arm", type=word, default="sparse", help="arm of the models (sparse)")
    parser.add_argument(
        "--examples", type=integer(least=1), default=1024, help="examples to trace (1024)"
    )
    default = f"runs/studies/{NAME}"
    parser.add_argument("--out", default=default, help=f"folder of the result ({default})")
    options = parser.parse_args(argv)

    out = output_path(options.out, inputs=[options.study, options.corpus])
    taken = f"Another process works in {out}. Wait for it, or choose another --out."
    with claim_folder(out, JOB, taken=taken):
        result = sentinel_result(
            options.study,
            options.arm,
            options.corpus,
            out,
            num_examples=options.examples,
            command=f"python -m scripts.sentinels {shlex.join(argv)}",
        )
        write_report(result, out)
    print(*result_lines(result), sep="\n")
    print(f"All numbers are in {out / 'study.md'}. Open {(out / 'study.html').resolve().as_uri()}")


if __name__ == "__main__":
    run_main(main)
