"""Measures sparse layers next to dense ones and peers, experts over ranks, and models.

    python -m scripts.benchmark layer [--json layer.json] [--cases 0 3] [--rounds 7]
    python -m scripts.benchmark exchange [--json exchange.json] [--ranks 2 4]
    python -m scripts.benchmark model [--json model.json] [--parts training fine_tuning]
    python -m scripts.benchmark decode [--json decode.json] [--experts 8] [--batches 1 8]
    python -m scripts.benchmark serve [--json serve.json] [--batches 1 8 32]
    python -m scripts.benchmark gpu [--json gpu.json] [--cases 4] [--batches 1 8]

With its defaults each takes less than 5 minutes on 2 cores. The file is saved after every round: after Ctrl-C
the same command continues. The peers are optional: pip install 'stmoe[bench]'. One that is missing, or does not
support a case, is skipped with a message. `exchange` starts its ranks itself, each with one thread (gloo) or, on
a machine with GPUs, one of them (NCCL).
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from benchmarks.cases import CASES, DTYPES, PASSES
from benchmarks.layer.layer import VARIANTS, LayerBenchmark, run_layer
from benchmarks.layer.variants import ON_REQUEST
from benchmarks.models.decoding import CASE, WEIGHTS, run_decoding
from benchmarks.models.gpu import GpuBenchmark, run_gpu
from benchmarks.models.model import PARTS, ModelCase, run_model
from benchmarks.models.serving import ServingBenchmark, run_serving
from benchmarks.ranks.exchange import ExchangeBenchmark, run_exchange
from moe.cli import Parser, integer, run_main
from moe.errors import ConfigError
from moe.files import output_path

_COUNT = integer(least=1, most=4_096, reason="more does not fit on one machine")

OPTIONS: dict[str, dict[str, Any]] = {
    "json": {"help": "file to save the table to, and to continue"},
    "rounds": {
        "type": integer(least=1, most=10_000, reason="a round takes seconds"),
        "default": 3,
        "help": "results are medians over them (3; serve: 2)",
    },
    "threads": {"type": _COUNT, "help": "threads of torch (all cores)"},
    "dtypes": {"nargs": "+", "choices": DTYPES, "default": list(DTYPES), "help": "both"},
    "device": {
        "choices": ("cpu", "cuda"),
        "default": "cuda" if torch.cuda.is_available() else "cpu",
        "help": "cuda when there is one, else cpu",
    },
    "cases": {"type": int, "nargs": "+", "choices": CASES, "help": "(all; exchange: 0 and 1)"},
    "passes": {"nargs": "+", "choices": PASSES, "default": PASSES[1:], "help": "(with backward)"},
    "variants": {
        "nargs": "+",
        "choices": (*VARIANTS, *ON_REQUEST),
        "default": VARIANTS,
        "help": "all that run on any machine at once; dense comes along",
    },
    "ranks": {
        "type": integer(least=1, most=256, reason="every rank is a process of this machine"),
        "nargs": "+",
        "default": [2],
        "help": "numbers of ranks (2)",
    },
    "weights": {"nargs": "+", "choices": WEIGHTS, "default": WEIGHTS, "help": "all"},
    "parts": {"nargs": "+", "choices": PARTS, "default": ["training"], "help": "(training)"},
    "experts": {
        "type": _COUNT,
        "nargs": "+",
        "default": [8],
        "help": "numbers of experts; gpu: the first (8)",
    },
    "sparse-layers": {"type": int, "default": 6, "help": "of the 12 blocks of each stack (6)"},
    "batches": {
        "type": _COUNT,
        "nargs": "+",
        "default": [1, 8],
        "help": "sequences to decode at once (1 and 8; serve: 8)",
    },
}


class Benchmark(NamedTuple):
    """A benchmark of the command.

    Attributes:
        help: What it measures, for --help.
        options: Names in `OPTIONS`, separated by spaces.
        run: Measures; takes the options by name.
        defaults: Its own defaults of options.
    """

    help: str
    options: str
    run: Callable[[dict[str, Any]], object]
    defaults: Mapping[str, Any] = MappingProxyType({})


def main(argv: list[str]) -> None:
    """Reads the options and measures."""
    parser = Parser(prog="python -m scripts.benchmark", description="Measures.")
    parsers = parser.add_subparsers(dest="benchmark", required=True)
    for name, benchmark in BENCHMARKS.items():
        subparser = parsers.add_parser(name, help=benchmark.help)
        for option in benchmark.options.split():
            subparser.add_argument(f"--{option}", **OPTIONS[option])
        subparser.set_defaults(**benchmark.defaults)

    options = vars(parser.parse_args(argv))
    if options["json"] is not None:
        options["json"] = output_path(options["json"], suffix=".json", option="--json")
    num_threads = options.pop("threads", None)
    if num_threads:
        torch.set_num_threads(num_threads)
    BENCHMARKS[options.pop("benchmark")].run(options)


def benchmark_layer(options: dict[str, Any]) -> None:
    """Measures sparse layers, by default in all cases of the device."""
    device = options.pop("device")
    cases = options.pop("cases")
    if not cases:
        cases = [index for index, case in CASES.items() if case.device in (None, device)]
    run_layer(LayerBenchmark(**options, cases=cases, device=torch.device(device)))


def with_case(options: dict[str, Any], case: ModelCase) -> dict[str, Any]:
    """Returns options for a benchmark of one model: its sizes, as `case`, replace `sparse_layers`."""
    case = dataclasses.replace(case, sparse_layers=options.pop("sparse_layers"))
    return {**options, "case": case}


def benchmark_gpu(options: dict[str, Any]) -> None:
    """Measures a GPU, and saves the results by its name where no file is named.

    Raises:
        ConfigError: When there is no GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            "The benchmark `gpu` measures a GPU, and torch finds none. Run it on a machine with a GPU; on a CPU, "
            "use python -m scripts.benchmark layer and model."
        )
    experts = options.pop("experts")[0]
    name = torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "_")
    json = options.pop("json") or Path(f"benchmarks/models/results/gpu_{name}.json")
    device = torch.device("cuda")
    run_gpu(GpuBenchmark(**options, experts=experts, device=device, json=json))


BENCHMARKS = {
    "layer": Benchmark(
        "one sparse layer",
        "json rounds threads cases dtypes device passes variants",
        benchmark_layer,
    ),
    "exchange": Benchmark(
        "a layer on several ranks",
        "json rounds cases dtypes device ranks",
        lambda options: run_exchange(ExchangeBenchmark(**options)),
        {"cases": [0, 1]},
    ),
    "model": Benchmark(
        "training step beside transformers' Switch and T5, on a CPU",
        "json rounds threads parts experts sparse-layers",
        lambda options: run_model(**with_case(options, ModelCase())),
    ),
    "decode": Benchmark(
        "decoding step beside Switch, T5, CTranslate2 and the memory's speed, on a CPU",
        "json rounds threads weights experts sparse-layers batches",
        lambda options: run_decoding(**with_case(options, CASE)),
    ),
    "serve": Benchmark(
        "continuous and static batches beside Switch, T5 and CTranslate2, on a CPU",
        "json rounds threads batches",
        lambda options: run_serving(ServingBenchmark(**options)),
        {"rounds": 2, "batches": [8]},
    ),
    "gpu": Benchmark(
        "layers, training, optimizers and decoding on a GPU",
        "json rounds cases experts batches",
        benchmark_gpu,
        {"cases": list(CASES)},
    ),
}


if __name__ == "__main__":
    run_main(main)
