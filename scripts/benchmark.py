"""Measures sparse layers next to dense ones and peers, experts over ranks, and models.

    python -m scripts.benchmark layer [--json layer.json] [--cases 0 3] [--rounds 7]
    python -m scripts.benchmark exchange [--json exchange.json] [--ranks 2 4]
    python -m scripts.benchmark model [--json model.json] [--experts 8]
    python -m scripts.benchmark adapters [--json adapters.json] [--threads 1]
    python -m scripts.benchmark nllb_moe [--json nllb_moe.json]
    python -m scripts.benchmark serve [--json serve.json] [--batches 1 8 32]
    python -m scripts.benchmark gpu [--json gpu.json] [--cases 4] [--batches 1 8]

The peers are optional: pip install 'stmoe[bench]'. One that is missing, or does not support a case,
is skipped with a message. `exchange` starts its ranks itself, each with one thread (gloo) or, on a
machine with GPUs, one of them (NCCL).
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.cases import CASES, DTYPES, PASSES
from benchmarks.layer.layer import VARIANTS, LayerBenchmark, run_layer
from benchmarks.layer.variants import ON_REQUEST
from benchmarks.models.adapters import run_adapters
from benchmarks.models.gpu import GpuBenchmark, run_gpu
from benchmarks.models.model import PARTS, ModelBenchmark, ModelCase, run_model
from benchmarks.models.nllb_moe import run_nllb_moe
from benchmarks.models.serving import ServingBenchmark, run_serving
from benchmarks.ranks.exchange import ExchangeBenchmark, run_exchange
from moe.cli import Parser, integer, run_main
from moe.errors import ConfigError
from moe.files import output_path

_COUNT = integer(least=1, most=4_096, reason="more does not fit on one machine")

OPTIONS: dict[str, dict[str, Any]] = {
    "json": {"help": "file to save the table to"},
    "rounds": {
        "type": integer(least=1, most=10_000, reason="a round takes seconds"),
        "default": 7,
        "help": "results are medians over them (7)",
    },
    "threads": {"type": _COUNT, "help": "threads of torch (all cores)"},
    "dtypes": {"nargs": "+", "choices": DTYPES, "default": list(DTYPES), "help": "both"},
    "device": {"choices": ("cpu", "cuda"), "help": "cuda when there is one, else cpu"},
    "cases": {
        "type": int,
        "nargs": "+",
        "choices": CASES,
        "help": "sizes (all; exchange: 0 and 1)",
    },
    "passes": {"nargs": "+", "choices": PASSES, "default": PASSES, "help": "both"},
    "variants": {
        "nargs": "+",
        "choices": (*VARIANTS, *ON_REQUEST),
        "default": VARIANTS,
        "help": "all that run on any machine at once; dense comes along",
    },
    "ranks": {
        "type": integer(least=1, most=256, reason="every rank is a process of this machine"),
        "nargs": "+",
        "default": [2, 4],
        "help": "numbers of ranks (2 and 4)",
    },
    "parts": {"nargs": "+", "choices": PARTS, "default": PARTS, "help": "all"},
    "experts": {
        "type": _COUNT,
        "nargs": "+",
        "default": [8],
        "help": "numbers of experts; training and gpu: the first (8)",
    },
    "sparse-layers": {"type": int, "default": 6, "help": "of the 12 blocks of each stack (6)"},
    "batches": {
        "type": _COUNT,
        "nargs": "+",
        "default": [1, 8],
        "help": "sequences to decode at once (1 and 8)",
    },
}


class Benchmark(NamedTuple):
    """A benchmark of the command.

    Attributes:
        help: What it measures, for --help.
        options: Names in `OPTIONS`, separated by spaces.
        run: Measures; takes the options by name.
    """

    help: str
    options: str
    run: Callable[[dict[str, Any]], object]


def main(argv: list[str]) -> None:
    """Reads the options and measures."""
    parser = Parser(prog="python -m scripts.benchmark", description="Measures.")
    parsers = parser.add_subparsers(dest="benchmark", required=True)
    for name, benchmark in BENCHMARKS.items():
        subparser = parsers.add_parser(name, help=benchmark.help)
        for option in benchmark.options.split():
            subparser.add_argument(f"--{option}", **OPTIONS[option])

    options = vars(parser.parse_args(argv))
    if options["json"] is not None:
        options["json"] = output_path(options["json"], suffix=".json", option="--json")
    num_threads = options.pop("threads", None)
    if num_threads:
        torch.set_num_threads(num_threads)
    BENCHMARKS[options.pop("benchmark")].run(options)


def benchmark_layer(options: dict[str, Any]) -> None:
    """Measures sparse layers, by default in all cases of the device."""
    device = _device(options)
    cases = options.pop("cases")
    if not cases:
        cases = [index for index, case in CASES.items() if case.device in (None, device)]
    run_layer(LayerBenchmark(**options, cases=cases, device=torch.device(device)))


def benchmark_exchange(options: dict[str, Any]) -> None:
    """Measures experts over ranks."""
    device = _device(options)
    cases = options.pop("cases") or [0, 1]
    run_exchange(ExchangeBenchmark(**options, cases=cases, device=device))


def benchmark_model(options: dict[str, Any]) -> None:
    """Measures whole models."""
    case = ModelCase(sparse_layers=options.pop("sparse_layers"))
    run_model(ModelBenchmark(**options, case=case))


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
    cases = options.pop("cases") or list(CASES)
    experts = options.pop("experts")[0]
    name = torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "_")
    json = options.pop("json") or Path(f"benchmarks/models/results/gpu_{name}.json")
    device = torch.device("cuda")
    run_gpu(GpuBenchmark(**options, cases=cases, experts=experts, device=device, json=json))


def _device(options: dict[str, Any]) -> str:
    return options.pop("device") or ("cuda" if torch.cuda.is_available() else "cpu")


BENCHMARKS = {
    "layer": Benchmark(
        "one sparse layer",
        "json rounds threads cases dtypes device passes variants",
        benchmark_layer,
    ),
    "exchange": Benchmark(
        "a layer on several ranks", "json rounds cases dtypes device ranks", benchmark_exchange
    ),
    "model": Benchmark(
        "training step and decoding beside transformers' Switch and T5, on a CPU",
        "json rounds threads parts experts sparse-layers batches",
        benchmark_model,
    ),
    "adapters": Benchmark(
        "adapters of experts beside full fine-tuning and plain PEFT, on a CPU",
        "json rounds threads",
        lambda options: run_adapters(**options),
    ),
    "nllb_moe": Benchmark(
        "NLLB-MoE beside transformers 4.57.6, which it installs, on one thread of a CPU",
        "json rounds",
        lambda options: run_nllb_moe(**options),
    ),
    "serve": Benchmark(
        "continuous and static batches beside Switch, T5 and CTranslate2, on a CPU",
        "json rounds threads batches",
        lambda options: run_serving(ServingBenchmark(**options)),
    ),
    "gpu": Benchmark(
        "layers, training, optimizers and decoding on a GPU; continues where it was interrupted",
        "json rounds cases experts batches",
        benchmark_gpu,
    ),
}


if __name__ == "__main__":
    run_main(main)
