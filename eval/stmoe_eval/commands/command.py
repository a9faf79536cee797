"""Options that several commands of `stmoe eval` have.

A command is a module with `build_parser() -> Parser` and `main(argv)`.
"""

import argparse

from moe.cli import real
from stmoe_eval.answers.inference import DTYPES, SAVED, Inference


def add_inference_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `inference_of` reads."""
    capacity = parser.add_mutually_exclusive_group()
    capacity.add_argument(
        "--dropless", action="store_true", help="no expert is ever full (default: as saved)"
    )
    capacity.add_argument(
        "--capacity-factor",
        type=real(above=0),
        help="slots of an expert over an even share of the tokens (default: as saved)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of weights (default: as saved)")


def inference_of(arguments: argparse.Namespace) -> Inference:
    """Returns the values of the options."""
    factor = arguments.capacity_factor or SAVED
    return Inference(None if arguments.dropless else factor, arguments.dtype or SAVED)


def name_list(text: str) -> list[str]:
    """Returns the names in a text, separated by commas, each once; the type of such an option."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(
            f"is {text!r}, in which a name is empty; expected names separated by commas"
        )
    return list(dict.fromkeys(names))
