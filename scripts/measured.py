"""Writes the page of all studies from their results.

python -m scripts.measured runs/studies --out runs/studies/measured.md
"""

if __name__ == "__main__":  # before the imports that take seconds
    from eval.start import answer_interrupts

    answer_interrupts()

from eval.studies.measured import measured_page, read_results
from moe.cli import Parser, path, run_main
from moe.files import output_path, write_text


def main(argv: list[str]) -> None:
    """Reads the results in a folder of studies, and writes one page of them."""
    parser = Parser(prog="python -m scripts.measured", description="Writes the page of studies.")
    parser.add_argument("studies", type=path, help="folder with a folder for each study")
    parser.add_argument("--out", required=True, help="page to write, e.g. runs/studies/measured.md")
    options = parser.parse_args(argv)
    out = output_path(options.out, suffix=".md", inputs=[options.studies])
    results = read_results(options.studies)
    write_text(out, measured_page(results))
    print(f"{len(results)} studies are in {out}.")


if __name__ == "__main__":
    run_main(main)
