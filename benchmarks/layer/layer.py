"""The layer benchmark: forward and backward of one sparse layer next to the dense layer and the peers.

Everything is measured in turn, in one run, and ends in one table.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.cases import CASES, DTYPES, Case, Pass, Problem, Variant, build_problem
from benchmarks.layer.peers import PEERS, UnavailableError, build_peer, close_peers
from benchmarks.layer.variants import ON_REQUEST, OURS, moe_dropless
from benchmarks.machine import Columns, describe_machine, format_report, print_report, save_report
from benchmarks.timing import capture_cuda_graph, measure_rounds, median_ratio, ratio_range
from moe.errors import ConfigError
from moe.kernels.host_memory import keep_freed_memory

VARIANTS = (*OURS, *PEERS)
GRAPHED = ("moe_dropless", "moe_static")

Row = dict[str, Any]
"""A row of the saved table."""


@dataclass(frozen=True)
class LayerBenchmark:
    """What to measure; the fields are the command's options.

    Attributes:
        cases: Keys of `CASES`.
        dtypes: Keys of `DTYPES`.
        passes: Of `PASSES`.
        variants: Of `VARIANTS` and `ON_REQUEST`; `dense` is measured in any case.
        rounds: How often everything is measured; results are medians.
        device: Where.
        json: File to save to after every case; None for none.
        report: Results so far.
    """

    cases: Sequence[int]
    dtypes: Sequence[str]
    passes: Sequence[Pass]
    variants: Sequence[str]
    rounds: int
    device: torch.device
    json: Path | None
    report: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks what argparse cannot.

        Raises:
            ConfigError: When the machine does not support the request.
        """
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "--device is cuda, but torch finds no GPU. Leave --device out, or write --device cpu."
            )
        for index in self.cases:
            needed_device = CASES[index].device or self.device.type
            if needed_device != self.device.type:
                raise ConfigError(
                    f"case {index} is for {needed_device}, and --device is {self.device}. Leave it out."
                )


def run_layer(benchmark: LayerBenchmark) -> None:
    """Measures, prints the table and saves it; results are saved as they come in."""
    # As in training.
    keep_freed_memory()

    # Saved before anything is measured: so an unwritable path is reported at once.
    report = benchmark.report
    report.update(describe_run(benchmark))
    save_report(report, benchmark.json)
    try:
        measure_cases(benchmark)
    finally:
        close_peers()

    print_report(format_report(report, COLUMNS), benchmark.json)


def describe_run(benchmark: LayerBenchmark) -> dict[str, Any]:
    """Returns the start of the report: the machine, and the number of repetitions."""
    return {**describe_machine(benchmark.device), "rounds": benchmark.rounds, "rows": []}


def measure_cases(benchmark: LayerBenchmark) -> None:
    """Adds the rows of all cases and dtypes that it lacks to the report, and saves it after each."""
    # Some cases have one dtype only.
    measured = {(row["case"], row["dtype"]) for row in benchmark.report["rows"]}
    groups: list[tuple[int, str]] = []
    for case in benchmark.cases:
        for dtype in benchmark.dtypes:
            if dtype in CASES[case].dtypes and (case, dtype) not in measured:
                groups.append((case, dtype))

    total = len(groups) * len(benchmark.passes) * benchmark.rounds
    with tqdm(total=total, desc="layer", unit="round", mininterval=1.0) as bar:
        for case, dtype in groups:
            # Every case compiles its own graphs, of which torch allows a few.
            torch.compiler.reset()
            benchmark.report["rows"] += measure_group(benchmark, case, dtype, bar)
            save_report(benchmark.report, benchmark.json)


def measure_group(benchmark: LayerBenchmark, case: int, dtype: str, bar: tqdm) -> list[Row]:
    """Returns the rows of one case in one dtype."""
    problem = build_problem(CASES[case], DTYPES[dtype], benchmark.device)
    variants = build_variants(problem, benchmark.variants, f"case {case}, {dtype}")
    differences = compare_outputs(variants)

    # Forward alone, and forward with backward.
    rows: list[Row] = []
    for pass_name in benchmark.passes:
        # Time all variants in turn.
        bar.set_postfix_str(f"case {case} {dtype} {pass_name}")
        times: list[dict[str, float]] = []
        for round_ in measure_rounds(variants, pass_name, benchmark.rounds, benchmark.device):
            times.append(round_)
            bar.update()

        for variant in variants:
            row: Row = {
                "case": case,
                "dtype": dtype,
                "pass": pass_name,
                "variant": variant.name,
                **describe_times(CASES[case], variant, pass_name, times),
                "difference": differences.get(variant.name),
                "note": variant.note,
            }
            if benchmark.device.type == "cuda" and variant.name in GRAPHED:
                row["cuda_graph"] = capture_cuda_graph(variant, pass_name)
            rows.append(row)
    return rows


def build_variants(problem: Problem, names: Sequence[str], where: str) -> list[Variant]:
    """Returns the variants that can run, the dense layer first.

    The reason why another one cannot is printed.

    Args:
        problem: The tensors that they share.
        names: Names of variants.
        where: Case and dtype, for the message.
    """
    # Ours can run always.
    variants: list[Variant] = []
    for name, build in {**OURS, **ON_REQUEST}.items():
        if name in names or name == "dense":
            variants.append(build(problem))

    # A peer may be missing, or not made for the case.
    for name in PEERS:
        if name in names:
            try:
                variants.append(build_peer(name, problem))
            except UnavailableError as error:
                tqdm.write(f"{name} ({where}): {error}")
    return variants


@torch.no_grad()
def compare_outputs(variants: Sequence[Variant]) -> dict[str, float]:
    """Returns |y - y'| / |y'| of every variant on the shared input, where y' is the output of `moe_dropless`."""
    # Weights are shared, so that all variants should give the same output.
    by_name = {variant.name: variant for variant in variants}
    if moe_dropless.__name__ not in by_name:
        return {}

    reference = by_name[moe_dropless.__name__]
    expected = reference.forward(reference.x).float()
    differences: dict[str, float] = {}
    for variant in variants:
        # The dense layer has its own input.
        if variant.x is reference.x:
            error = variant.forward(variant.x).float() - expected
            differences[variant.name] = float(error.norm() / expected.norm())
    return differences


def describe_times(
    case: Case, variant: Variant, pass_name: Pass, times: Sequence[dict[str, float]]
) -> Row:
    """Returns the measured numbers of a row.

    FLOPs count the products that the variant really computes.
    """
    # TFLOP/s: operations by 1e12 over milliseconds by 1e3.
    ms = statistics.median(round_[variant.name] for round_ in times)
    flops = case.flops(variant.rows, pass_name)
    return {
        "ms": ms,
        "ratio": median_ratio(times, variant.name, "dense"),
        "ratio_range": ratio_range(times, variant.name, "dense"),
        "product_rows": variant.rows,
        "flops": flops,
        "tflops": flops / ms / 1e9,
    }


def show_range(row: Row) -> str:
    """Returns the smallest and the largest ratio of a row."""
    least, largest = row["ratio_range"]
    return f"{least:.2f}-{largest:.2f}"


def relative_rows(row: Row) -> float:
    """Returns the products of a row over those of the dense layer.

    A layer with a capacity does fewer than the dense one, a static one as many or more.
    """
    return row["product_rows"] / CASES[row["case"]].rows


def show_notes(row: Row) -> str:
    """Returns the notes on a row."""
    notes = [row["note"]] if row["note"] else []
    if "cuda_graph" in row:
        notes.append(f"CUDA graph: {row['cuda_graph']}")
    return "; ".join(notes)


COLUMNS: Columns = (
    ("case", "case", ""),
    ("dtype", "dtype", ""),
    ("pass", "pass", ""),
    ("variant", "variant", ""),
    ("ms", "ms", ".1f"),
    ("ratio", "ratio", ".2f"),
    ("range", show_range, ""),
    ("rows", relative_rows, ".2f"),
    ("TFLOP/s", "tflops", ".2f"),
    ("difference", "difference", ".0e"),
    ("note", show_notes, ""),
)
