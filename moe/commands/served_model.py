"""Options of the model with which `generate` and `serve` answer."""

from typing import Any

from moe.cli import Parser, integer, model_path


def add_model_options(parser: Parser) -> None:
    """Adds --model, --max-input, --mmap and the languages."""
    parser.add_argument(
        "--model",
        type=model_path,
        required=True,
        help="folder of a model with its tokenizer, or names",
    )
    parser.add_argument(
        "--max-input", type=integer(least=1), default=512, help="longest text, in tokens (512)"
    )
    add_mmap_option(parser)
    add_language_options(parser)


def add_mmap_option(parser: Parser) -> None:
    """Adds --mmap."""
    parser.add_argument(
        "--mmap",
        action="store_true",
        help="leave weights in their files until they are used: a model larger than memory, on a CPU",
    )


def add_language_options(parser: Any) -> None:
    """Adds --source-language and --target-language."""
    for side, texts in (("source", "inputs"), ("target", "answers")):
        parser.add_argument(
            f"--{side}-language",
            metavar="CODE",
            help=f"language of {texts}, e.g. fra_Latn (the tokenizer's)",
        )
