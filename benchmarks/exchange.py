"""The exchange benchmark: one layer whose experts are spread over ranks, beside what it cannot do
without.

A layer must compute and must send rows; `ideal` is the time of one process for all tokens, divided
by the ranks, and that of the same four all-to-alls with nothing around them. All of it is measured
in turn, in one run.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from tqdm import tqdm

from benchmarks.cases import CASES, DTYPES, Case, Problem, build_problem
from benchmarks.machine import describe_machine, save_report
from benchmarks.peers import UnavailableError
from benchmarks.ranks import Job, Sending, measure_together, run_ranks, sendings
from benchmarks.scaling import ScalingCase, format_scaling, scaling_on_ranks
from benchmarks.timing import median_ratio
from benchmarks.transformers_ep import transformers_all_to_all
from benchmarks.variants import CAPACITY_FACTOR, build_layer
from moe.distributed.mesh import MeshConfig, build_mesh
from moe.errors import ConfigError
from moe.inspection.tables import format_table
from moe.sparse.layer import RouterOutput, SparseFeedForward

LAYERS: dict[str, tuple[float | None, Any]] = {
    "dropless": (None, "ragged"),
    "capacity": (CAPACITY_FACTOR, "ragged"),
    "static": (CAPACITY_FACTOR, "static"),
}
PEER = "transformers"

Row = dict[str, Any]


@dataclass(frozen=True)
class ExchangeBenchmark:
    """What to measure; the fields are the command's options.

    Attributes:
        cases: Keys of `CASES`.
        dtypes: Keys of `DTYPES`.
        ranks: Numbers of ranks.
        rounds: How often everything is measured; results are medians.
        device: Where: `cpu` or `cuda`.
        scaling: Whether a whole training step is measured, too.
        json: File to save to after every case; None for none.
        report: What has been measured.
    """

    cases: Sequence[int]
    dtypes: Sequence[str]
    ranks: Sequence[int]
    rounds: int
    device: str
    scaling: ScalingCase | None
    json: Path | None
    report: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks what argparse cannot.

        Raises:
            ConfigError: When the machine or a case cannot do what was asked for.
        """
        for number in self.ranks:
            if number < 2:
                raise ConfigError(
                    f"--ranks is {number}; expected at least 2, since one sends nothing."
                )
            if self.device == "cuda" and number > (gpus := torch.cuda.device_count()):
                raise ConfigError(
                    f"--ranks is {number}, but torch finds {gpus} GPUs. Write --device cpu, or fewer."
                )
            for index in self.cases:
                case = CASES[index]
                if case.device not in (None, self.device):
                    raise ConfigError(
                        f"case {index} is for {case.device}, and --device is {self.device}. Leave it out."
                    )
                if case.num_experts % number or case.tokens % number:
                    raise ConfigError(
                        f"--ranks is {number}, but case {index} has {case.num_experts} experts and {case.tokens} "
                        "tokens, which cannot be spread evenly over them."
                    )


def run_exchange(benchmark: ExchangeBenchmark) -> None:
    """Measures, prints the tables and saves them; what is measured is saved as it goes."""
    report = benchmark.report
    report.update(
        describe_machine(torch.device(benchmark.device)),
        threads=1,
        rounds=benchmark.rounds,
        rows=[],
    )
    groups = [
        (number, case, dtype)
        for number in benchmark.ranks
        for case in benchmark.cases
        for dtype in benchmark.dtypes
    ]
    for number, case, dtype in tqdm(groups, desc="exchange", unit="case"):
        keys = {"ranks": number, "case": case, "dtype": dtype}
        arguments = (CASES[case], dtype, benchmark.rounds)
        rows = run_ranks(exchange_on_ranks, number, benchmark.device, *arguments)
        report["rows"] += [keys | row for row in rows]
        save_report(benchmark.report, benchmark.json)
    if benchmark.scaling:
        number = max(benchmark.ranks)
        report["scaling"] = []
        for dtype in benchmark.dtypes:
            case = dataclasses.replace(benchmark.scaling, precision=dtype)
            result = run_ranks(scaling_on_ranks, number, benchmark.device, case, benchmark.rounds)
            report["scaling"].append(result)
            save_report(benchmark.report, benchmark.json)
    print(format_report(report))
    if benchmark.json:
        print(f"The table is in {benchmark.json}.")


def exchange_on_ranks(device: torch.device, case: Case, dtype: str, rounds: int) -> list[Row]:
    """Returns the rows of one case in one dtype; runs on every rank."""
    mesh = build_mesh(MeshConfig(ep=dist.get_world_size()), device.type)
    problem = build_problem(case, DTYPES[dtype], device)
    whole, mine, apart = cut_problem(problem)
    jobs, facts = [], {}
    for name, settings in LAYERS.items():
        alone, spread, local = (build_layer(problem, *settings) for problem in (whole, mine, apart))
        spread.set_parallel_axes(mesh.ep, None)
        sent, router = watch(spread, mine)
        facts[name] = describe_bytes(sent, router, mine)
        bare = [sending.repeat(device) for sending in sent if sending.is_rows]
        jobs += [
            Job(f"{name}/one", *_pass(alone, whole))
            if dist.get_rank() == 0
            else Job(f"{name}/one", None),
            Job(f"{name}/bare", lambda bare=bare: [exchange() for exchange in bare]),
            Job(f"{name}/apart", *_pass(local, apart)),
            Job(name, *_pass(spread, mine)),
        ]
    note = ""
    try:
        peer = transformers_all_to_all(problem, mine)
        jobs.append(Job(PEER, lambda: peer.run("forward_backward"), peer.clear))
    except UnavailableError as error:
        note = str(error)
    times = measure_together(jobs, rounds, device)
    rows: list[Row] = [
        {"layer": name, **describe_layer(name, times)} | facts[name] for name in LAYERS
    ]
    if note:
        return [*rows, {"layer": PEER, "note": note}]
    rows[0]["over_transformers"] = median_ratio(times, "dropless", PEER)
    return [*rows, {"layer": PEER, "ms": statistics.median(round_[PEER] for round_ in times)}]


def cut_problem(problem: Problem) -> tuple[Problem, Problem, Problem]:
    """Returns what one process does for all; this rank's part with its experts; and a part that
    needs nobody else.

    Tokens are routed in one group for each rank in all of them. The last has as many tokens and
    rows as this rank's part, all of them for the experts that are here.
    """
    rank, size, case = dist.get_rank(), dist.get_world_size(), problem.case
    tokens, share = case.tokens // size, case.num_experts // size
    experts = slice(rank * share, (rank + 1) * share)
    x, gradient = (
        rearrange(t.detach(), "1 (p s) d -> p s d", p=size) for t in (problem.x, problem.gradient)
    )

    def replace(rows: slice, **changes: Any) -> Problem:
        part = dataclasses.replace(
            problem, x=x[rows].clone().requires_grad_(), gradient=gradient[rows].clone()
        )
        return dataclasses.replace(part, **changes)

    here = {name: getattr(problem, name)[experts].clone() for name in ("first", "down")}
    group = dataclasses.replace(case, tokens=tokens)
    few = dataclasses.replace(group, num_experts=share)
    own = slice(rank, rank + 1)
    return (
        replace(slice(None), case=group),
        replace(own, case=group, **here),
        replace(own, case=few, gate=problem.gate[experts].clone(), **here),
    )


def _pass(
    layer: SparseFeedForward, problem: Problem
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns the forward and backward pass of a layer, and what gives its gradients back."""

    def clear() -> None:
        layer.zero_grad()
        problem.x.grad = None

    return lambda: layer(problem.x)[0].backward(problem.gradient), clear


def watch(layer: SparseFeedForward, problem: Problem) -> tuple[list[Sending], RouterOutput]:
    """Returns what this rank sends in forward and backward pass, and what its router did."""
    with sendings() as sent:
        y, router = layer(problem.x)
        y.backward(problem.gradient)
    return sent, router


def describe_bytes(sent: Sequence[Sending], router: RouterOutput, problem: Problem) -> Row:
    """Returns the bytes that leave for other ranks, of all ranks together, and the fewest that
    could.

    The fewest is the row of every kept place whose expert is elsewhere, once each way, in both
    passes.
    """
    share = problem.case.num_experts // dist.get_world_size()
    elsewhere = router.plan.expert_index // share != dist.get_rank()
    away = int((router.plan.accepted & elsewhere).sum())
    load = router.stats.accepted_load.clone()
    numbers = [
        sum(sending.away for sending in sent if sending.is_rows),
        sum(sending.away for sending in sent if not sending.is_rows),
        4 * away * problem.case.d_model * problem.x.element_size(),
    ]
    total = torch.cat([torch.tensor(numbers, device=load.device), load])
    dist.all_reduce(total)
    row_bytes, count_bytes, fewest = total[:3].tolist()
    by_rank = rearrange(total[3:], "(p e) -> p e", e=share).sum(dim=1).double()
    return {
        "row_bytes": row_bytes,
        "count_bytes": count_bytes,
        "fewest_bytes": fewest,
        "bytes_ratio": row_bytes / fewest,
        "fullest_rank": float(by_rank.max() / by_rank.mean()),
    }


def describe_layer(name: str, times: Sequence[Mapping[str, float]]) -> Row:
    """Returns the measured numbers of a layer; ratios are medians over rounds."""
    ranks = dist.get_world_size()

    def ratio(base: Callable[[Mapping[str, float]], float]) -> float:
        return statistics.median(round_[name] / base(round_) for round_ in times)

    return {
        "ms": statistics.median(round_[name] for round_ in times),
        "one_process_ms": statistics.median(round_[f"{name}/one"] for round_ in times),
        "apart_ms": statistics.median(round_[f"{name}/apart"] for round_ in times),
        "bare_ms": statistics.median(round_[f"{name}/bare"] for round_ in times),
        "over_ideal": ratio(lambda round_: round_[f"{name}/one"] / ranks + round_[f"{name}/bare"]),
        "over_apart": ratio(lambda round_: round_[f"{name}/apart"] + round_[f"{name}/bare"]),
    }


def format_report(report: Mapping[str, Any]) -> str:
    """Returns the report as text."""
    lines = [
        f"{report['device']}, one thread a rank, torch {report['torch']}, {report['rounds']} rounds, forward_backward",
        "ideal = one process / ranks + bare exchange; apart = as many rows without an exchange, on all ranks at once",
        "",
        format_table(HEADER, [_cells(row) for row in report["rows"]]),
    ]
    if "scaling" in report:
        lines += ["", format_scaling(report["scaling"])]
    return "\n".join(lines)


HEADER = (
    *(
        "ranks",
        "case",
        "dtype",
        "layer",
        "ms",
        "one process",
        "bare",
        "/ ideal",
        "/ (apart + bare)",
        "fullest rank",
    ),
    *("MB sent", "/ fewest", "/ transformers", "note"),
)


def _cells(row: Mapping[str, Any]) -> list[str]:
    """Returns a row of the table as text."""
    cells = [str(row["ranks"]), str(row["case"]), row["dtype"], row["layer"]]
    numbers = {name: row.get(name) for name in ("ms", "one_process_ms", "bare_ms")}
    cells += ["" if value is None else f"{value:.1f}" for value in numbers.values()]
    ratios = [row.get(name) for name in ("over_ideal", "over_apart", "fullest_rank")]
    sent = None if "row_bytes" not in row else row["row_bytes"] / 1e6
    ratios += [sent, row.get("bytes_ratio"), row.get("over_transformers")]
    return [
        *cells,
        *("" if value is None else f"{value:.2f}" for value in ratios),
        row.get("note", ""),
    ]
