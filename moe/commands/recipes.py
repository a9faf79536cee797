"""stmoe recipes: lists the recipes that `--config` knows by name, each with what it is.

stmoe recipes
"""

from moe.cli import Parser
from moe.training.recipe_files import recipes_folder


def main(argv: list[str]) -> None:
    """Prints the name of each recipe and the first line of its header."""
    description = "Lists the recipes that --config knows by name."
    Parser(prog="stmoe recipes", description=description).parse_args(argv)

    for path in sorted(recipes_folder().glob("*.yaml")):
        header = path.read_text(encoding="utf-8").partition("\n")[0]
        print(f"{path.stem:<32} {header.removeprefix('# ')}")
