"""The layer benchmark: forward and backward of one sparse layer beside the dense layer and the
peers, in one table.
"""

import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.cases import CASES, DTYPES, Case, Pass, Problem, Variant, build_problem
from benchmarks.machine import describe_machine, save_report
from benchmarks.memory import MEASURED, can_measure, peak_mib
from benchmarks.peers import PEERS, UnavailableError, build_peer, close_peers
from benchmarks.timing import (
    capture_cuda_graph,
    measure,
    measure_rounds,
    median_ratio,
    square_tflops,
)
from benchmarks.variants import OURS, moe_dropless, routing_only, stats_of
from moe.errors import ConfigError
from moe.inspection.tables import format_table

VARIANTS = (*OURS, *PEERS)
PROFILED_CASE = 0

Row = dict[str, Any]


@dataclass(frozen=True)
class LayerBenchmark:
    """What to measure; the fields are the command's options.

    Attributes:
        cases: Keys of `CASES`.
        dtypes: Keys of `DTYPES`.
        passes: Of `PASSES`.
        variants: Of `VARIANTS`; `dense` is measured in any case.
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
            wanted = CASES[index].device or self.device.type
            if wanted != self.device.type:
                raise ConfigError(
                    f"case {index} is for {wanted}, and --device is {self.device}. Leave it out."
                )


def run_layer(benchmark: LayerBenchmark) -> None:
    """Measures, prints the table and saves it; what is measured is saved as it goes."""
    benchmark.report.update(describe_run(benchmark), rows=[])
    save_report(benchmark.report, benchmark.json)
    try:
        groups = [
            (case, dtype)
            for case in benchmark.cases
            for dtype in benchmark.dtypes
            if dtype in CASES[case].dtypes
        ]
        total = len(groups) * len(benchmark.passes) * benchmark.rounds
        with tqdm(total=total, desc="layer", unit="round", mininterval=1.0) as bar:
            for case, dtype in groups:
                benchmark.report["rows"] += measure_group(benchmark, case, dtype, bar)
                save_report(benchmark.report, benchmark.json)
        if benchmark.memory:
            add_peaks(benchmark)
        if benchmark.profile:
            benchmark.report["profile"] = [
                row for dtype in benchmark.dtypes for row in profile_layer(benchmark, dtype)
            ]
        save_report(benchmark.report, benchmark.json)
    finally:
        close_peers()
    print(format_report(benchmark.report))
    if benchmark.json:
        print(f"The table is in {benchmark.json}.")


def describe_run(benchmark: LayerBenchmark) -> dict[str, Any]:
    """Returns what a reader must know of the machine, with the speed of one large square product by
    dtype.
    """
    return describe_machine(benchmark.device) | {
        "rounds": benchmark.rounds,
        "square_tflops": {
            name: square_tflops(name, benchmark.rounds, benchmark.device)
            for name in benchmark.dtypes
        },
    }


def measure_group(benchmark: LayerBenchmark, case: int, dtype: str, bar: tqdm) -> list[Row]:
    """Returns the rows of one case in one dtype."""
    problem = build_problem(CASES[case], DTYPES[dtype], benchmark.device)
    variants = build_variants(problem, benchmark.variants, f"case {case}, {dtype}")
    differences = compare_outputs(variants)
    square = benchmark.report["square_tflops"][dtype]
    rows = []
    for pass_name in benchmark.passes:
        bar.set_postfix_str(f"case {case} {dtype} {pass_name}")
        times = []
        for round_ in measure_rounds(variants, pass_name, benchmark.rounds, benchmark.device):
            times.append(round_)
            bar.update()
        for variant in variants:
            keys: Row = {"case": case, "dtype": dtype, "pass": pass_name, "variant": variant.name}
            row = keys | describe_times(CASES[case], variant, pass_name, times, square)
            row |= {"difference": differences.get(variant.name), "note": variant.note}
            if benchmark.device.type == "cuda" and variant.name == "moe_static":
                row["cuda_graph"] = capture_cuda_graph(variant, pass_name)
            rows.append(row)
    return rows


def build_variants(problem: Problem, names: Sequence[str], where: str) -> list[Variant]:
    """Returns the variants that can run, the dense layer first; says of every other one why not."""
    variants = [OURS[name](problem) for name in OURS if name in names or name == "dense"]
    for name in PEERS:
        if name in names:
            try:
                variants.append(build_peer(name, problem))
            except UnavailableError as error:
                tqdm.write(f"{name} ({where}): {error}")
    return variants


@torch.no_grad()
def compare_outputs(variants: Sequence[Variant]) -> dict[str, float]:
    """Returns |y - y'| / |y'| of every variant on the shared input, where y' is the output of
    `moe_dropless`.
    """
    reference = next(
        (variant for variant in variants if variant.name == moe_dropless.__name__), None
    )
    if reference is None:
        return {}
    expected = reference.forward(reference.x).float()
    comparable = [variant for variant in variants if variant.x is reference.x]
    return {
        v.name: float((v.forward(v.x).float() - expected).norm() / expected.norm())
        for v in comparable
    }


def describe_times(
    case: Case, variant: Variant, pass_name: Pass, times: Sequence[dict[str, float]], square: float
) -> Row:
    """Returns the measured numbers of a row; FLOPs are those of the products that the variant
    really does.
    """
    ms = statistics.median(round_[variant.name] for round_ in times)
    flops = case.flops(variant.rows, pass_name)
    return {
        "ms": ms,
        "ratio": median_ratio(times, variant.name, "dense"),
        "product_rows": variant.rows,
        "flops": flops,
        "tflops": flops / ms / 1e9,
        "fraction_of_square": flops / ms / 1e9 / square,
    }


def add_peaks(benchmark: LayerBenchmark) -> None:
    """Adds `peak_mib` and its ratio to dense to the forward_backward rows: float32, or the only
    dtype of a case.
    """
    if not can_measure(benchmark.device):
        print(f"memory: {platform.system()} does not tell the peak of a process; no peak_mib")
        return
    wanted = [row for row in benchmark.report["rows"] if _has_peak(row)]
    dense: dict[int, float] = {}
    for row in tqdm(wanted, desc="memory", unit="process", mininterval=1.0):
        try:
            settings = (row["dtype"], row["variant"], benchmark.device, torch.get_num_threads())
            peak = peak_mib(row["case"], *settings)
        except UnavailableError as error:
            tqdm.write(f"{row['variant']} (case {row['case']}, memory): {error}")
            continue
        if row["variant"] == "dense":
            dense[row["case"]] = peak
        row["peak_mib"] = peak
        row["peak_ratio"] = peak / dense[row["case"]] if row["case"] in dense else None
        save_report(benchmark.report, benchmark.json)


def _has_peak(row: Mapping[str, Any]) -> bool:
    """Returns whether the memory of a row is measured."""
    dtypes = CASES[row["case"]].dtypes
    return (
        row["variant"] in MEASURED
        and row["pass"] == "forward_backward"
        and row["dtype"] == dtypes[0]
    )


def profile_layer(benchmark: LayerBenchmark, dtype: str) -> Iterator[Row]:
    """Yields the share of routing, dispatch and combine in forward and backward of the dropless
    layer.

    It is the time of the same layer with experts that hand their rows through, losses and
    statistics included; and that of the statistics alone.
    """
    problem = build_problem(CASES[PROFILED_CASE], DTYPES[dtype], benchmark.device)
    full, routing = moe_dropless(problem), routing_only(problem)
    variants = [full, routing]
    times = list(measure_rounds(variants, "forward_backward", benchmark.rounds, benchmark.device))
    stats_ms = statistics.median(
        measure(stats_of(problem), benchmark.device) for _ in range(benchmark.rounds)
    )
    yield {
        "case": PROFILED_CASE,
        "dtype": dtype,
        "pass": "forward_backward",
        "ms": statistics.median(round_[full.name] for round_ in times),
        "routing_ms": statistics.median(round_[routing.name] for round_ in times),
        "routing_share": median_ratio(times, routing.name, full.name),
        "stats_ms": stats_ms,
    }


def format_report(report: Mapping[str, Any]) -> str:
    """Returns the report as text: the machine, the table, the breakdown."""
    square = ", ".join(f"{name} {value:.2f}" for name, value in report["square_tflops"].items())
    lines = [
        f"{report['device']}, {report['threads']} threads, torch {report['torch']}, {report['rounds']} rounds",
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


HEADER = (
    *("case", "dtype", "pass", "variant", "ms", "ratio", "rows", "TFLOP/s", "of square"),
    *("peak MiB", "peak ratio", "difference", "note"),
)


def _cells(row: Mapping[str, Any]) -> list[str]:
    """Returns a row of the table as text; `rows` are relative to the dense layer's."""
    numbers = {
        "ms": row["ms"],
        "ratio": row["ratio"],
        "rows": row["product_rows"] / CASES[row["case"]].rows,
        "tflops": row["tflops"],
        "fraction": row["fraction_of_square"],
        "peak": row.get("peak_mib"),
        "peak_ratio": row.get("peak_ratio"),
    }
    formats = {"ms": ".1f", "peak": ".0f"}
    cells = [
        "" if value is None else format(value, formats.get(name, ".2f"))
        for name, value in numbers.items()
    ]
    difference = "" if row["difference"] is None else f"{row['difference']:.0e}"
    graph = f"CUDA graph: {row['cuda_graph']}" if "cuda_graph" in row else ""
    note = "; ".join(text for text in (row["note"], graph) if text)
    return [str(row["case"]), row["dtype"], row["pass"], row["variant"], *cells, difference, note]
