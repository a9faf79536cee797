"""Measures one sparse layer beside the dense layer and the peers: time, ratio to dense, memory.

python -m scripts.benchmark layer [--json benchmarks/layer.json] [--cases 0 3] [--rounds 7] [--threads 4] [--profile]

The peers are optional: pip install 'stmoe[bench]'. One that is missing, or does not do a case, is left out with a line.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.cases import CASES, DTYPES, PASSES
from benchmarks.layer import VARIANTS, LayerBenchmark, run_layer
from moe.errors import ConfigError, run_main


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command and its benchmarks."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmark", description="Measures.")
    layer = parser.add_subparsers(dest="benchmark", required=True).add_parser("layer", help="one sparse layer")
    layer.add_argument("--json", type=Path, help="file to save the table to")
    layer.add_argument("--cases", type=int, nargs="+", choices=CASES, help="sizes (all that the device can do)")
    layer.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="both")
    layer.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES, help="both")
    layer.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="all; dense comes along")
    layer.add_argument("--rounds", type=int, default=7, help="results are medians over them (7)")
    layer.add_argument("--threads", type=int, help="threads of torch (all cores)")
    layer.add_argument("--device", choices=("cpu", "cuda"), help="cuda when there is one, else cpu")
    layer.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure peaks (yes)")
    layer.add_argument("--profile", action="store_true", help="measure the share of routing, dispatch and combine")
    return parser


def main(argv: list[str]) -> None:
    """Reads the options and measures."""
    options = build_parser().parse_args(argv)
    if options.threads is not None and options.threads < 1:
        raise ConfigError(f"--threads is {options.threads}; expected at least 1.")
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    possible = [index for index, case in CASES.items() if case.device in (None, device.type)]
    run_layer(
        LayerBenchmark(
            cases=options.cases or possible,
            dtypes=options.dtypes,
            passes=options.passes,
            variants=options.variants,
            rounds=options.rounds,
            device=device,
            memory=options.memory,
            profile=options.profile,
            json=options.json,
        )
    )


if __name__ == "__main__":
    run_main(main)
