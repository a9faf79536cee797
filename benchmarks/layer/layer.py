"""The layer benchmark: forward and backward of one sparse layer beside the dense layer and the peers.

Everything is measured in turn, in one run, and ends in one table.
"""

import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.cases import CASES, DTYPES, Case, Pass, Problem, Variant, build_problem
from benchmarks.layer.memory import MEASURED, can_measure, peak_mib
from benchmarks.layer.peers import PEERS, UnavailableError, build_peer, close_peers
from benchmarks.layer.variants import ON_REQUEST, OURS, moe_dropless, routing_only, stats_of
from benchmarks.machine import describe_machine, format_number, machine_line, save_report
from benchmarks.timing import (
    capture_cuda_graph,
    measure,
    measure_rounds,
    median_ratio,
    ratio_range,
    square_tflops,
)
from moe.errors import ConfigError
from moe.inspection.tables import format_table
from moe.kernels.host_memory import keep_freed_memory

VARIANTS = (*OURS, *PEERS)
GRAPHED = ("moe_dropless", "moe_static")
PROFILED_CASE = 0

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
        memory: Whether peaks are measured, too.
        profile: Whether to measure the share of routing, dispatch and combine.
        json: File to save to after every case; None for none.
        report: What has been measured.
    """

    cases: Sequence[int]
    dtypes: Sequence[str]
    passes: Sequence[Pass]
    variants: Sequence[str]
    rounds: int
    device: torch.device
    memory: bool
    profile: bool
    json: Path | None
    report: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks what argparse cannot.

        Raises:
            ConfigError: When the machine cannot do what was asked for.
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
    """Measures, prints the table and saves it; what is measured is saved as it goes."""
    # As training does.
    keep_freed_memory()

    # Saved before anything is measured: a path that cannot be written is known at once.
    report = benchmark.report
    report.update(describe_run(benchmark), rows=[])
    save_report(report, benchmark.json)
    try:
        measure_cases(benchmark)
        if benchmark.memory:
            add_peaks(benchmark)
        if benchmark.profile:
            report["profile"] = []
            for dtype in benchmark.dtypes:
                report["profile"].append(profile_layer(benchmark, dtype))
        save_report(report, benchmark.json)
    finally:
        close_peers()

    print(format_report(report))
    if benchmark.json:
        print(f"The table is in {benchmark.json}.")


def describe_run(benchmark: LayerBenchmark) -> dict[str, Any]:
    """Returns what a reader must know of the machine: its speed at one large square product, too."""
    # A product at full speed, to compare the layer's with.
    tflops: dict[str, float] = {}
    for name in benchmark.dtypes:
        tflops[name] = square_tflops(name, benchmark.rounds, benchmark.device)
    machine = describe_machine(benchmark.device)
    return {**machine, "rounds": benchmark.rounds, "square_tflops": tflops}


def measure_cases(benchmark: LayerBenchmark) -> None:
    """Adds the rows of all cases and dtypes to the report, and saves it after each."""
    # Some cases have one dtype only.
    groups: list[tuple[int, str]] = []
    for case in benchmark.cases:
        for dtype in benchmark.dtypes:
            if dtype in CASES[case].dtypes:
                groups.append((case, dtype))

    total = len(groups) * len(benchmark.passes) * benchmark.rounds
    with tqdm(total=total, desc="layer", unit="round", mininterval=1.0) as bar:
        for case, dtype in groups:
            benchmark.report["rows"] += measure_group(benchmark, case, dtype, bar)
            save_report(benchmark.report, benchmark.json)


def measure_group(benchmark: LayerBenchmark, case: int, dtype: str, bar: tqdm) -> list[Row]:
    """Returns the rows of one case in one dtype."""
    problem = build_problem(CASES[case], DTYPES[dtype], benchmark.device)
    variants = build_variants(problem, benchmark.variants, f"case {case}, {dtype}")
    differences = compare_outputs(variants)
    square = benchmark.report["square_tflops"][dtype]

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
                **describe_times(CASES[case], variant, pass_name, times, square),
                "difference": differences.get(variant.name),
                "note": variant.note,
            }
            if benchmark.device.type == "cuda" and variant.name in GRAPHED:
                row["cuda_graph"] = capture_cuda_graph(variant, pass_name)
            rows.append(row)
    return rows


def build_variants(problem: Problem, names: Sequence[str], where: str) -> list[Variant]:
    """Returns the variants that can run, the dense layer first.

    Why another one cannot is printed.

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
    """Returns |y - y'| / |y'| of every variant on the shared input, y' being that of `moe_dropless`."""
    # Weights are shared, so that all variants should give the same output.
    by_name = {variant.name: variant for variant in variants}
    if moe_dropless.__name__ not in by_name:
        return {}

    reference = by_name[moe_dropless.__name__]
    expected = reference.forward(reference.x).float()
    differences: dict[str, float] = {}
    for variant in variants:
        # The dense layer has an input of its own.
        if variant.x is reference.x:
            error = variant.forward(variant.x).float() - expected
            differences[variant.name] = float(error.norm() / expected.norm())
    return differences


def describe_times(
    case: Case, variant: Variant, pass_name: Pass, times: Sequence[dict[str, float]], square: float
) -> Row:
    """Returns the measured numbers of a row.

    FLOPs are those of the products that the variant really does.
    """
    # TFLOP/s: operations by 1e12 over milliseconds by 1e3.
    ms = statistics.median(round_[variant.name] for round_ in times)
    flops = case.flops(variant.rows, pass_name)
    tflops = flops / ms / 1e9
    return {
        "ms": ms,
        "ratio": median_ratio(times, variant.name, "dense"),
        "ratio_range": ratio_range(times, variant.name, "dense"),
        "product_rows": variant.rows,
        "flops": flops,
        "tflops": tflops,
        "fraction_of_square": tflops / square,
    }


def add_peaks(benchmark: LayerBenchmark) -> None:
    """Adds `peak_mib` and its ratio to dense to the rows whose memory is measured."""
    if not can_measure(benchmark.device):
        print(f"memory: {platform.system()} does not tell the peak of a process; no peak_mib")
        return

    rows = [row for row in benchmark.report["rows"] if _has_peak(row)]
    dense_peaks: dict[int, float] = {}
    threads = torch.get_num_threads()
    for row in tqdm(rows, desc="memory", unit="process", mininterval=1.0):
        case = row["case"]
        try:
            peak = peak_mib(case, row["dtype"], row["variant"], benchmark.device, threads)
        except UnavailableError as error:
            tqdm.write(f"{row['variant']} (case {case}, memory): {error}")
            continue

        # The dense layer comes first in every case.
        if row["variant"] == "dense":
            dense_peaks[case] = peak
        row["peak_mib"] = peak
        row["peak_ratio"] = peak / dense_peaks[case] if case in dense_peaks else None
        save_report(benchmark.report, benchmark.json)


def _has_peak(row: Mapping[str, Any]) -> bool:
    """Returns whether memory is measured: forward_backward in float32, or in a case's only dtype."""
    return (
        row["variant"] in MEASURED
        and row["pass"] == "forward_backward"
        and row["dtype"] == CASES[row["case"]].dtypes[0]
    )


def profile_layer(benchmark: LayerBenchmark, dtype: str) -> Row:
    """Returns the share of routing, dispatch and combine in forward and backward of our layer.

    It is the time of the same layer with experts that hand their rows through, losses and
    statistics included; and that of the statistics alone.
    """
    problem = build_problem(CASES[PROFILED_CASE], DTYPES[dtype], benchmark.device)
    # The same layer twice: with its experts, and with experts that do nothing.
    whole = moe_dropless(problem)
    routing = routing_only(problem)
    variants = [whole, routing]
    times = list(measure_rounds(variants, "forward_backward", benchmark.rounds, benchmark.device))

    # The statistics alone, which are a part of both.
    compute_stats = stats_of(problem)
    stats_times = [measure(compute_stats, benchmark.device) for _ in range(benchmark.rounds)]
    return {
        "case": PROFILED_CASE,
        "dtype": dtype,
        "pass": "forward_backward",
        "ms": statistics.median(round_[whole.name] for round_ in times),
        "routing_ms": statistics.median(round_[routing.name] for round_ in times),
        "routing_share": median_ratio(times, routing.name, whole.name),
        "stats_ms": statistics.median(stats_times),
    }


# ---- the report as text ----

HEADER = (
    "case",
    "dtype",
    "pass",
    "variant",
    "ms",
    "ratio",
    "range",
    "rows",
    "TFLOP/s",
    "of square",
    "peak MiB",
    "peak ratio",
    "difference",
    "note",
)


def format_report(report: Mapping[str, Any]) -> str:
    """Returns the report as text: the machine, the table, the breakdown."""
    square = ", ".join(f"{name} {value:.2f}" for name, value in report["square_tflops"].items())
    lines = [
        machine_line(report, f"{report['threads']} threads"),
        f"one square product, TFLOP/s: {square}",
        "",
        format_table(HEADER, [_cells(row) for row in report["rows"]]),
    ]
    for row in report.get("profile", ()):
        lines.append(
            f"\ncase {row['case']} {row['dtype']}: routing, dispatch and combine take {row['routing_ms']:.1f} ms of "
            f"{row['ms']:.1f} ms, {row['routing_share']:.1%} of {row['pass']}; statistics {row['stats_ms']:.2f} ms"
        )
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> list[str]:
    """Returns a row of the table as text; `rows` are relative to the dense layer's."""
    # A layer with a capacity does fewer products than the dense one, a static one as many or more.
    relative_rows = row["product_rows"] / CASES[row["case"]].rows
    notes = [row["note"]] if row["note"] else []
    if "cuda_graph" in row:
        notes.append(f"CUDA graph: {row['cuda_graph']}")
    return [
        str(row["case"]),
        row["dtype"],
        row["pass"],
        row["variant"],
        f"{row['ms']:.1f}",
        f"{row['ratio']:.2f}",
        "{:.2f}-{:.2f}".format(*row["ratio_range"]),
        f"{relative_rows:.2f}",
        f"{row['tflops']:.2f}",
        f"{row['fraction_of_square']:.2f}",
        format_number(row.get("peak_mib"), ".0f"),
        format_number(row.get("peak_ratio"), ".2f"),
        format_number(row["difference"], ".0e"),
        "; ".join(notes),
    ]
