"""The options of scripts.benchmark."""

import argparse
from collections.abc import Mapping
from typing import Any

from benchmarks.cases import CASES, DTYPES, PASSES
from benchmarks.layer import VARIANTS
from benchmarks.model import PARTS
from benchmarks.variants import ON_REQUEST
from moe.checks import check_integer
from moe.cli import Parser

_BOUNDS = {
    "rounds": (10_000, "a round takes seconds"),
    "threads": (4_096, "no machine has more cores"),
    "ranks": (256, "every rank is a process of this machine"),
    "experts": (4_096, "their weights must fit into memory"),
    "jobs": (4_096, "no machine has more cores"),
    "repeats": (1_000_000, "a thousand take a quarter of an hour"),
    "batches": (4_096, "the sequences are decoded at once"),
}


def check_numbers(options: Mapping[str, Any]) -> None:
    """Raises a ConfigError for a number with which the benchmark would never come to an end.

    Args:
        options: Options of the command, by name.
    """
    check_integer("--seed", options.get("seed"), least=0, optional="leave it out")

    # An option may be one number, several, or missing.
    for name, (most, reason) in _BOUNDS.items():
        value = options.get(name)
        numbers = value if isinstance(value, list) else [value]
        for number in numbers:
            check_integer(
                f"--{name}", number, least=1, most=most, reason=reason, optional="leave it out"
            )


def build_parser() -> Parser:
    """Returns the parser of the command and its benchmarks."""
    parser = Parser(prog="python -m scripts.benchmark", description="Measures.")
    parsers = parser.add_subparsers(dest="benchmark", required=True)

    # One command for each benchmark.
    layer_help = "one sparse layer"
    exchange_help = "a layer and a training step on several ranks"
    model_help = "training step and decoding beside transformers' Switch and T5, on a CPU"
    evaluation_help = "ranking and generating beside lm-evaluation-harness, on a CPU"
    layer = parsers.add_parser("layer", help=layer_help)
    exchange = parsers.add_parser("exchange", help=exchange_help)
    intervals_help = "how often the intervals of reports hold the true value, in a simulation"
    model = parsers.add_parser("model", help=model_help)
    evaluation = parsers.add_parser("eval", help=evaluation_help)
    intervals = parsers.add_parser("intervals", help=intervals_help)
    tracing_help = "recording, replaying and editing of routing beside an evaluation, on a CPU"
    tracing = parsers.add_parser("tracing", help=tracing_help)
    products_help = "which of torch's libraries multiplies float32 faster on this CPU"
    products = parsers.add_parser("products", help=products_help)

    gpu_help = "one sparse layer in bfloat16, and the step of decoding as a CUDA graph"
    gpu = parsers.add_parser("gpu", help=gpu_help)

    busy_help = "training step and decoding beside busy processes, over the same alone"
    busy = parsers.add_parser("busy", help=busy_help)
    startup_help = "CPU time and memory until a command explains its options"
    startup = parsers.add_parser("startup", help=startup_help)

    input_help = "making batches beside Hugging Face datasets, in seconds of a core"
    inputs = parsers.add_parser("input", help=input_help)

    # Options that several benchmarks have.
    for benchmark in (layer, exchange, model, evaluation, tracing, gpu, busy, startup, inputs):
        _add_common(benchmark)
    for benchmark in (layer, model, evaluation, tracing, busy):
        benchmark.add_argument("--threads", type=int, help="threads of torch (all cores)")
    for benchmark in (layer, exchange):
        _add_sizes(benchmark)

    _add_layer(layer)
    _add_model(model)
    _add_exchange(exchange)
    _add_intervals(intervals)
    _add_json(products)
    _add_gpu(gpu)
    only_help = "names of the table, e.g. scripts.demo 'eval run' (all)"
    startup.add_argument("--only", nargs="+", metavar="START", help=only_help)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    # Every benchmark saves what it prints.
    _add_json(parser)
    parser.add_argument("--rounds", type=int, default=7, help="results are medians over them (7)")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", help="file to save the table to")


def _add_intervals(parser: argparse.ArgumentParser) -> None:
    # A simulation has samples in place of rounds.
    _add_json(parser)
    parser.add_argument("--repeats", type=int, default=1000, help="samples of each case (1000)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the cases (1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples (0)")


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases", type=int, nargs="+", choices=CASES, help="sizes (layer: all; exchange: 0 and 1)"
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="both")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="cuda when there is one, else cpu"
    )


def _add_layer(parser: argparse.ArgumentParser) -> None:
    # What is measured: by default everything that can run on this machine.
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES, help="both")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=(*VARIANTS, *ON_REQUEST),
        default=VARIANTS,
        help="all that any machine measures at once; dense comes along",
    )
    parser.add_argument(
        "--memory", action=argparse.BooleanOptionalAction, default=True, help="measure peaks (yes)"
    )
    parser.add_argument(
        "--profile", action="store_true", help="measure the share of routing, dispatch and combine"
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    # Sizes beyond these are those of google/switch-base-8.
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="all")

    parser.add_argument(
        "--experts",
        type=int,
        nargs="+",
        default=[8],
        help="numbers of experts; training: the first (8)",
    )
    parser.add_argument(
        "--sparse-layers", type=int, default=6, help="of the 12 blocks of each stack (6)"
    )
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[1, 8],
        help="sequences to decode at once (1 and 8)",
    )


def _add_gpu(parser: argparse.ArgumentParser) -> None:
    # The model is that of `model`.
    parser.add_argument("--cases", type=int, nargs="+", choices=CASES, help="sizes (all)")
    parser.add_argument("--experts", type=int, default=8, help="experts of the model (8)")
    batches_help = "sequences to decode at once (1 and 8)"
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help=batches_help)


def _add_exchange(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (2 and 4)"
    )
    parser.add_argument(
        "--scaling", action=argparse.BooleanOptionalAction, default=True, help="training step (yes)"
    )
