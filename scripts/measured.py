"""Writes the page of all studies from their results.

python -m scripts.measured runs/studies --out runs/studies/measured.md
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

from pathlib import Path

from eval.studies.report import STUDY_JSON, read_result
from eval.studies.results_page import curve_figures, measured_page, read_results
from moe.cli import Parser, path, run_main
from moe.errors import DataError
from moe.files import output_path, write_text
from moe.parsing import read_text


def main(argv: list[str]) -> None:
    """Reads the results in a folder of studies, and writes one page of them."""
    parser = Parser(prog="python -m scripts.measured", description="Writes the page of studies.")
    parser.add_argument("studies", type=path, help="folder with a folder for each study")
    parser.add_argument("--out", required=True, help="page to write, e.g. runs/studies/measured.md")
    parser.add_argument(
        "--add",
        type=path,
        nargs="+",
        default=[],
        help="folders of finished studies whose study.json is copied into STUDIES first",
    )
    options = parser.parse_args(argv)

    # Results are read before anything is written.
    out = output_path(options.out, suffix=".md")
    for folder in options.add:
        read_result(folder / STUDY_JSON)
    for folder in options.add:
        copy_result(folder, options.studies)

    results = read_results(options.studies)
    if not results:
        raise DataError(
            f"There is no {STUDY_JSON} below {options.studies}. Give the folder of studies."
        )
    for name, figure in curve_figures(results).items():
        write_text(out.with_suffix("") / f"{name}.svg", figure + "\n")
    write_text(out, measured_page(results, out.stem))
    print(f"{len(results)} studies are in {out}.")


def copy_result(folder: Path, studies: Path) -> None:
    """Copies the result of a study to its place among others, under the name of its folder."""
    text = read_text(folder / STUDY_JSON, advice="Make it again with --report.")
    write_text(studies / folder.resolve().name / STUDY_JSON, text)


if __name__ == "__main__":
    run_main(main)
