"""Measures a sparse layer beside the dense layer and peers, experts spread over ranks, whole models
and evaluation.

python -m scripts.benchmark layer [--json benchmarks/layer.json] [--cases 0 3] [--rounds 7]
[--threads 4] [--profile] python -m scripts.benchmark exchange [--json benchmarks/exchange_cpu.json]
[--cases 0 1] [--ranks 2 4] [--rounds 7] python -m scripts.benchmark model [--json
benchmarks/model_cpu.json] [--parts training generation] [--experts 8] python -m scripts.benchmark
eval [--json benchmarks/eval_cpu.json] [--rounds 7] [--threads 4]

The peers are optional: pip install 'stmoe[bench]'. One that is missing, or does not do a case, is
left out with a line. `exchange` starts its ranks itself, each with one thread (gloo) or, on a
machine with GPUs, one of them (NCCL).
"""

if __name__ == "__main__":  # before the imports that take seconds
    from eval.start import answer_interrupts

    answer_interrupts()

import torch

from benchmarks.cases import CASES
from benchmarks.evaluation import EvaluationBenchmark, run_evaluation
from benchmarks.exchange import ExchangeBenchmark, run_exchange
from benchmarks.layer import LayerBenchmark, run_layer
from benchmarks.model import ModelBenchmark, ModelCase, run_model
from benchmarks.options import build_parser, check_numbers
from benchmarks.scaling import ScalingCase
from moe.cli import run_main
from moe.files import output_path


def main(argv: list[str]) -> None:
    """Reads the options and measures."""
    options = vars(build_parser().parse_args(argv))
    check_numbers(options)
    benchmark, threads = options.pop("benchmark"), options.pop("threads", None)
    if options["json"] is not None:
        options["json"] = output_path(options["json"], suffix=".json", option="--json")
    if threads:
        torch.set_num_threads(threads)
    if benchmark == "model":
        case = ModelCase(sparse_layers=options.pop("sparse_layers"))
        run_model(ModelBenchmark(**options, case=case))
        return
    if benchmark == "eval":
        run_evaluation(EvaluationBenchmark(**options))
        return
    device = options.pop("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    cases = options.pop("cases")
    if benchmark == "exchange":
        scaling = ScalingCase() if options.pop("scaling") else None
        run_exchange(
            ExchangeBenchmark(**options, cases=cases or [0, 1], scaling=scaling, device=device)
        )
        return
    cases = cases or [index for index, case in CASES.items() if case.device in (None, device)]
    run_layer(LayerBenchmark(**options, cases=cases, device=torch.device(device)))


if __name__ == "__main__":
    run_main(main)
