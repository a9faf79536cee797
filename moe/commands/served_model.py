"""Options and loading of the model with which `generate` and `serve` answer."""

from typing import Any

import torch

from moe.cli import Parser, integer, path
from moe.hosts.all_hosts import load_model


def add_model_options(parser: Parser) -> None:
    """Adds --model, --max-input and --mmap."""
    parser.add_argument(
        "--model", type=path, required=True, help="folder of a model with its tokenizer"
    )
    parser.add_argument(
        "--max-input", type=integer(least=1), default=512, help="longest text, in tokens (512)"
    )
    parser.add_argument(
        "--mmap",
        action="store_true",
        help="leave weights in their files until they are used: a model larger than memory, on a CPU",
    )


def load_served_model(options: Any) -> Any:
    """Returns the model of the options, whose experts drop nothing, on the fastest device it may use."""
    model = load_model(options.model, dropless=True, mmap=options.mmap).eval()
    return model.to("cuda" if torch.cuda.is_available() and not options.mmap else "cpu")
