"""Measures sparse layers beside dense ones and peers, experts over ranks, models, evaluation, how
often its intervals hold the truth, what recording of routing costs, how batches are made, and which
library multiplies.

    python -m scripts.benchmark layer [--json benchmarks/layer.json] [--cases 0 3] [--rounds 7]
    python -m scripts.benchmark exchange [--json benchmarks/exchange_cpu.json] [--ranks 2 4]
    python -m scripts.benchmark model [--json benchmarks/model_cpu.json] [--experts 8]
    python -m scripts.benchmark eval [--json benchmarks/eval_cpu.json] [--threads 4]
    python -m scripts.benchmark intervals [--json benchmarks/intervals.json] [--repeats 1000]
    python -m scripts.benchmark gpu [--json benchmarks/gpu.json] [--cases 4] [--batches 1 8]
    python -m scripts.benchmark busy [--json benchmarks/busy.json] [--threads 2]
    python -m scripts.benchmark startup [--json benchmarks/startup.json] [--only 'eval run']
    python -m scripts.benchmark tracing [--json benchmarks/tracing_cpu.json] [--threads 1]
    python -m scripts.benchmark input [--json benchmarks/input_cpu.json] [--rounds 5]
    python -m scripts.benchmark products [--json products.json]

The peers are optional: pip install 'stmoe[bench]'. One that is missing, or does not do a case, is
left out with a line. `exchange` starts its ranks itself, each with one thread (gloo) or, on a
machine with GPUs, one of them (NCCL).
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

from typing import Any

import torch

from benchmarks.busy import BusyBenchmark, run_busy
from benchmarks.cases import CASES
from benchmarks.evaluation import EvaluationBenchmark, run_evaluation
from benchmarks.exchange import ExchangeBenchmark, run_exchange
from benchmarks.gpu import GpuBenchmark, run_gpu
from benchmarks.input import InputBenchmark, run_input
from benchmarks.intervals import IntervalBenchmark, run_intervals
from benchmarks.layer import LayerBenchmark, run_layer
from benchmarks.model import ModelBenchmark, ModelCase, run_model
from benchmarks.options import build_parser, check_numbers
from benchmarks.products import run_products
from benchmarks.scaling import ScalingCase
from benchmarks.startup import StartupBenchmark, run_startup
from benchmarks.tracing import TracingBenchmark, run_tracing
from moe.cli import run_main
from moe.files import output_path


def main(argv: list[str]) -> None:
    """Reads the options and measures."""
    options = vars(build_parser().parse_args(argv))
    check_numbers(options)
    if options["json"] is not None:
        options["json"] = output_path(options["json"], suffix=".json", option="--json")

    num_threads = options.pop("threads", None)
    if num_threads:
        torch.set_num_threads(num_threads)

    # The other options are those of the benchmark.
    benchmark = options.pop("benchmark")
    BENCHMARKS[benchmark](options)


def benchmark_model(options: dict[str, Any]) -> None:
    """Measures whole models."""
    case = ModelCase(sparse_layers=options.pop("sparse_layers"))
    run_model(ModelBenchmark(**options, case=case))


def benchmark_evaluation(options: dict[str, Any]) -> None:
    """Measures an evaluation."""
    run_evaluation(EvaluationBenchmark(**options))


def benchmark_intervals(options: dict[str, Any]) -> None:
    """Measures the coverage of intervals."""
    run_intervals(IntervalBenchmark(**options))


def benchmark_tracing(options: dict[str, Any]) -> None:
    """Measures what recording of routing costs."""
    run_tracing(TracingBenchmark(**options))


def benchmark_products(options: dict[str, Any]) -> None:
    """Measures which library multiplies faster."""
    run_products(**options)


def benchmark_gpu(options: dict[str, Any]) -> None:
    """Measures a GPU."""
    cases = options.pop("cases") or list(CASES)
    run_gpu(GpuBenchmark(**options, cases=cases))


def benchmark_busy(options: dict[str, Any]) -> None:
    """Measures a busy machine."""
    run_busy(BusyBenchmark(**options, threads=torch.get_num_threads()))


def benchmark_startup(options: dict[str, Any]) -> None:
    """Measures how commands start."""
    run_startup(StartupBenchmark(**options))


def benchmark_input(options: dict[str, Any]) -> None:
    """Measures how batches are made."""
    run_input(InputBenchmark(**options))


def benchmark_exchange(options: dict[str, Any]) -> None:
    """Measures experts over ranks."""
    device = _device(options)
    cases = options.pop("cases") or [0, 1]
    scaling = ScalingCase() if options.pop("scaling") else None
    run_exchange(ExchangeBenchmark(**options, cases=cases, scaling=scaling, device=device))


def benchmark_layer(options: dict[str, Any]) -> None:
    """Measures sparse layers."""
    device = _device(options)
    cases = options.pop("cases")
    if not cases:
        cases = [index for index, case in CASES.items() if case.device in (None, device)]
    run_layer(LayerBenchmark(**options, cases=cases, device=torch.device(device)))


def _device(options: dict[str, Any]) -> str:
    return options.pop("device") or ("cuda" if torch.cuda.is_available() else "cpu")


BENCHMARKS = {
    "layer": benchmark_layer,
    "exchange": benchmark_exchange,
    "model": benchmark_model,
    "eval": benchmark_evaluation,
    "intervals": benchmark_intervals,
    "tracing": benchmark_tracing,
    "products": benchmark_products,
    "gpu": benchmark_gpu,
    "busy": benchmark_busy,
    "startup": benchmark_startup,
    "input": benchmark_input,
}


if __name__ == "__main__":
    run_main(main)
