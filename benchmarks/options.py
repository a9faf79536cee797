"""The options of scripts.benchmark."""

import argparse
from collections.abc import Mapping
from typing import Any

from benchmarks.cases import CASES, DTYPES, PASSES
from benchmarks.layer import VARIANTS
from benchmarks.model import PARTS
from moe.checks import check_integer
from moe.cli import Parser

_BOUNDS = {
    "rounds": (10_000, "a round takes seconds"),
    "threads": (4_096, "no machine has more cores"),
    "ranks": (256, "every rank is a process of this machine"),
    "experts": (4_096, "their weights must fit into memory"),
    "batches": (4_096, "the sequences are decoded at once"),
}


def check_numbers(options: Mapping[str, Any]) -> None:
    """Raises a ConfigError for a number of the options, by their names, that would never come to an
    end.
    """
    for name, (most, reason) in _BOUNDS.items():
        given = options.get(name)
        numbers = given if isinstance(given, list) else [given]
        for number in numbers:
            check_integer(
                f"--{name}", number, least=1, most=most, reason=reason, optional="leave it out"
            )


def build_parser() -> Parser:
    """Returns the parser of the command and its benchmarks."""
    parser = Parser(prog="python -m scripts.benchmark", description="Measures.")
    parsers = parser.add_subparsers(dest="benchmark", required=True)
    layer = parsers.add_parser("layer", help="one sparse layer")
    exchange = parsers.add_parser("exchange", help="a layer and a training step on several ranks")
    model = parsers.add_parser(
        "model", help="training step and decoding beside transformers' Switch and T5, on a CPU"
    )
    evaluation = parsers.add_parser(
        "eval", help="ranking and generating beside lm-evaluation-harness, on a CPU"
    )
    for one in (layer, exchange, model, evaluation):
        one.add_argument("--json", help="file to save the table to")
        one.add_argument("--rounds", type=int, default=7, help="results are medians over them (7)")
    for one in (layer, exchange):
        one.add_argument(
            "--cases",
            type=int,
            nargs="+",
            choices=CASES,
            help="sizes (layer: all; exchange: 0 and 1)",
        )
        one.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="both")
        one.add_argument(
            "--device", choices=("cpu", "cuda"), help="cuda when there is one, else cpu"
        )
    layer.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES, help="both")
    layer.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="all; dense comes along"
    )
    for one in (layer, model, evaluation):
        one.add_argument("--threads", type=int, help="threads of torch (all cores)")
    layer.add_argument(
        "--memory", action=argparse.BooleanOptionalAction, default=True, help="measure peaks (yes)"
    )
    layer.add_argument(
        "--profile", action="store_true", help="measure the share of routing, dispatch and combine"
    )
    model.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="both")
    model.add_argument(
        "--experts",
        type=int,
        nargs="+",
        default=[8],
        help="numbers of experts; training: the first (8)",
    )
    model.add_argument(
        "--sparse-layers", type=int, default=6, help="of the 12 blocks of each stack (6)"
    )
    model.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[1, 8],
        help="sequences to decode at once (1 and 8)",
    )
    exchange.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (2 and 4)"
    )
    exchange.add_argument(
        "--scaling", action=argparse.BooleanOptionalAction, default=True, help="training step (yes)"
    )
    return parser
