"""The layer benchmark: forward and backward of one sparse layer next to the dense layer and the peers.

Everything is measured in turn, in one run, and ends in one table.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.cases import CASES, DTYPES, Case, Pass, Problem, Variant, build_problem
from benchmarks.layer.peers import PEERS, UnavailableError, build_peer
from benchmarks.layer.variants import ON_REQUEST, OURS, moe_dropless
from benchmarks.machine import (
    build_copy,
    build_squares,
    copy_gb_per_second,
    describe_machine,
    square_tflops,
)
from benchmarks.report import Columns, Group, Row, measure_groups, rows_by_round
from benchmarks.timing import capture_cuda_graph, measure_rounds, median_ratio, ratio_range
from moe.errors import ConfigError
from moe.kernels.host_memory import keep_freed_memory

VARIANTS = (*OURS, *PEERS)
GRAPHED = ("moe_dropless", "moe_static")


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
        json: File to save to after every round; None for none.
    """

    cases: Sequence[int]
    dtypes: Sequence[str]
    passes: Sequence[Pass]
    variants: Sequence[str]
    rounds: int
    device: torch.device
    json: Path | None

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
    """Measures, prints the table and saves it."""
    # As in training.
    keep_freed_memory()

    settings = {**describe_machine(benchmark.device), "rounds": benchmark.rounds}
    measure_groups(settings, layer_groups(benchmark), {"rows": COLUMNS}, benchmark.json)


def layer_groups(benchmark: LayerBenchmark) -> list[Group]:
    """Returns a group for every case, dtype that it has, and pass."""
    groups: list[Group] = []
    for case, dtype, pass_name in product(benchmark.cases, benchmark.dtypes, benchmark.passes):
        if dtype in CASES[case].dtypes:
            keys = {"case": case, "dtype": dtype, "pass": pass_name}
            groups.append(Group(keys, partial(measure_pass, benchmark, case, dtype, pass_name)))
    return groups


def measure_pass(
    benchmark: LayerBenchmark, case: int, dtype: str, pass_name: Pass
) -> Iterator[list[Row]]:
    """Yields a row for every variant after every round."""
    # Every group compiles its own graphs, of which torch allows a few.
    torch.compiler.reset()
    device = benchmark.device
    problem = build_problem(CASES[case], DTYPES[dtype], device)
    variants = build_variants(problem, benchmark.variants, f"case {case}, {dtype}")
    differences = compare_outputs(variants)

    def describe(times: Sequence[dict[str, float]]) -> list[Row]:
        rows: list[Row] = []
        for variant in variants:
            numbers = describe_times(CASES[case], variant, pass_name, times, device)
            difference = differences.get(variant.name)
            rows.append({"variant": variant.name, **numbers, "difference": difference})
            rows[-1]["note"] = variant.note
        return rows

    rulers = build_squares(DTYPES[dtype], device) | build_copy(device)
    rows: list[Row] = []
    rounds = measure_rounds(variants, pass_name, benchmark.rounds, device, rulers)
    for rows in rows_by_round(rounds, describe):
        yield rows

    if device.type == "cuda":
        for row, variant in zip(rows, variants, strict=True):
            if variant.name in GRAPHED:
                row["cuda_graph"] = capture_cuda_graph(variant, pass_name)
        yield rows


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
    case: Case,
    variant: Variant,
    pass_name: Pass,
    times: Sequence[dict[str, float]],
    device: torch.device,
) -> Row:
    """Returns the measured numbers of a row.

    FLOPs count the products that the variant really computes. `of_square` is their speed over that of
    the better library's square product in the same round.
    """
    # TFLOP/s: operations by 1e12 over milliseconds by 1e3.
    ms = statistics.median(round_[variant.name] for round_ in times)
    flops = case.flops(variant.rows, pass_name)
    shares: list[float] = []
    for round_ in times:
        shares.append(flops / round_[variant.name] / 1e9 / square_tflops(round_, device))
    return {
        "ms": ms,
        "ratio": median_ratio(times, variant.name, "dense"),
        "ratio_range": ratio_range(times, variant.name, "dense"),
        "product_rows": variant.rows,
        "flops": flops,
        "tflops": flops / ms / 1e9,
        "of_square": statistics.median(shares),
        "copy_gb_per_second": statistics.median(map(copy_gb_per_second, times)),
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
    ("/ square", "of_square", ".2f"),
    ("copy GB/s", "copy_gb_per_second", ".1f"),
    ("difference", "difference", ".0e"),
    ("note", show_notes, ""),
)
