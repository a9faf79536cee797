"""Measures a sparse layer beside the dense layer and the peers, its experts spread over ranks, and whole models.

python -m scripts.benchmark layer [--json benchmarks/layer.json] [--cases 0 3] [--rounds 7] [--threads 4] [--profile]
python -m scripts.benchmark exchange [--json benchmarks/exchange_cpu.json] [--cases 0 1] [--ranks 2 4] [--rounds 7]
python -m scripts.benchmark model [--json benchmarks/model_cpu.json] [--parts training generation] [--experts 8]

The peers are optional: pip install 'stmoe[bench]'. One that is missing, or does not do a case, is left out with a line.
`exchange` starts its ranks itself, each with one thread (gloo) or, on a machine with GPUs, one of them (NCCL).
"""

import argparse
from pathlib import Path

import torch

from benchmarks.cases import CASES, DTYPES, PASSES
from benchmarks.exchange import ExchangeBenchmark, run_exchange
from benchmarks.layer import VARIANTS, LayerBenchmark, run_layer
from benchmarks.model import PARTS, ModelBenchmark, ModelCase, run_model
from benchmarks.scaling import ScalingCase
from moe.errors import ConfigError, run_main


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command and its benchmarks."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmark", description="Measures.")
    parsers = parser.add_subparsers(dest="benchmark", required=True)
    layer = parsers.add_parser("layer", help="one sparse layer")
    exchange = parsers.add_parser("exchange", help="a layer and a training step on several ranks")
    model = parsers.add_parser("model", help="training step and decoding beside transformers' Switch and T5, on a CPU")
    for one in (layer, exchange, model):
        one.add_argument("--json", type=Path, help="file to save the table to")
        one.add_argument("--rounds", type=int, default=7, help="results are medians over them (7)")
    for one in (layer, exchange):
        one.add_argument("--cases", type=int, nargs="+", choices=CASES, help="sizes (layer: all; exchange: 0 and 1)")
        one.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="both")
        one.add_argument("--device", choices=("cpu", "cuda"), help="cuda when there is one, else cpu")
    layer.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES, help="both")
    layer.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="all; dense comes along")
    for one in (layer, model):
        one.add_argument("--threads", type=int, help="threads of torch (all cores)")
    layer.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure peaks (yes)")
    layer.add_argument("--profile", action="store_true", help="measure the share of routing, dispatch and combine")
    model.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="both")
    model.add_argument(
        "--experts", type=int, nargs="+", default=[8], help="numbers of experts; training: the first (8)"
    )
    model.add_argument("--sparse-layers", type=int, default=6, help="of the 12 blocks of each stack (6)")
    model.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="sequences to decode at once (1 and 8)")
    exchange.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (2 and 4)")
    exchange.add_argument("--scaling", action=argparse.BooleanOptionalAction, default=True, help="training step (yes)")
    return parser


def main(argv: list[str]) -> None:
    """Reads the options and measures."""
    options = vars(build_parser().parse_args(argv))
    benchmark, threads = options.pop("benchmark"), options.pop("threads", None)
    if threads is not None and threads < 1:
        raise ConfigError(f"--threads is {threads}; expected at least 1.")
    if threads:
        torch.set_num_threads(threads)
    if benchmark == "model":
        case = ModelCase(sparse_layers=options.pop("sparse_layers"))
        run_model(ModelBenchmark(**options, case=case))
        return
    device = options.pop("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    cases = options.pop("cases")
    if benchmark == "exchange":
        scaling = ScalingCase() if options.pop("scaling") else None
        run_exchange(ExchangeBenchmark(**options, cases=cases or [0, 1], scaling=scaling, device=device))
        return
    cases = cases or [index for index, case in CASES.items() if case.device in (None, device)]
    run_layer(LayerBenchmark(**options, cases=cases, device=torch.device(device)))


if __name__ == "__main__":
    run_main(main)
