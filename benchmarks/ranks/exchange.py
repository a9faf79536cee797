"""The exchange benchmark: one layer whose experts are on several ranks, compared with the unavoidable cost.

A layer must compute and must send rows; `ideal` is the time of one process for all tokens divided
by the number of ranks, plus the time of the same four all-to-alls alone. All of it is measured in
turn, in one run.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from einops import rearrange

from benchmarks.cases import CASES, DTYPES, Case, Problem, build_problem
from benchmarks.layer.variants import CAPACITY_FACTOR, DispatchForm, build_layer
from benchmarks.machine import describe_machine
from benchmarks.ranks.processes import Job, Transfer, measure_together, record_transfers, run_ranks
from benchmarks.report import Columns, Group, Row, measure_groups, rows_by_round
from moe.distributed.mesh import Mesh, MeshConfig, build_mesh
from moe.errors import ConfigError
from moe.sparse.layer import RouterOutput, SparseFeedForward

LAYERS: dict[str, tuple[float | None, DispatchForm]] = {
    "dropless": (None, "ragged"),
    "capacity": (CAPACITY_FACTOR, "ragged"),
    "static": (CAPACITY_FACTOR, "static"),
}
"""Capacity factor and form of dispatch of the layers that are measured."""


@dataclass(frozen=True)
class ExchangeBenchmark:
    """What to measure; the fields are the command's options.

    Attributes:
        cases: Keys of `CASES`.
        dtypes: Keys of `DTYPES`.
        ranks: Numbers of ranks.
        rounds: How often everything is measured; results are medians.
        device: Where: `cpu` or `cuda`.
        json: File to save to after every round; None for none.
    """

    cases: Sequence[int]
    dtypes: Sequence[str]
    ranks: Sequence[int]
    rounds: int
    device: str
    json: Path | None

    def __post_init__(self) -> None:
        """Checks what argparse cannot.

        Raises:
            ConfigError: When the machine or a case does not support the request.
        """
        for num_ranks in self.ranks:
            if num_ranks < 2:
                raise ConfigError(
                    f"--ranks is {num_ranks}; expected at least 2, since a single rank sends nothing."
                )
            if self.device == "cuda" and num_ranks > torch.cuda.device_count():
                raise ConfigError(
                    f"--ranks is {num_ranks}, but torch finds {torch.cuda.device_count()} GPUs. Use --device cpu, or "
                    "fewer ranks."
                )
            for index in self.cases:
                self._check_case(index, num_ranks)

    def _check_case(self, index: int, num_ranks: int) -> None:
        # Experts and tokens must be the same number on every rank.
        case = CASES[index]
        if case.device not in (None, self.device):
            raise ConfigError(
                f"case {index} is for {case.device}, and --device is {self.device}. Leave it out."
            )
        if case.num_experts % num_ranks or case.tokens % num_ranks:
            raise ConfigError(
                f"--ranks is {num_ranks}, but case {index} has {case.num_experts} experts and {case.tokens} "
                "tokens, which cannot be spread evenly over them."
            )


def run_exchange(benchmark: ExchangeBenchmark) -> None:
    """Measures, prints the table and saves it; `ideal` is one process / ranks + bare exchange."""
    # Start the processes once for each combination.
    groups: list[Group] = []
    for num_ranks, case, dtype in product(benchmark.ranks, benchmark.cases, benchmark.dtypes):
        arguments = (num_ranks, benchmark.device, CASES[case], dtype, benchmark.rounds)
        keys = {"ranks": num_ranks, "case": case, "dtype": dtype}
        groups.append(Group(keys, partial(run_ranks, exchange_on_ranks, *arguments)))

    # Every rank has one thread, however many cores there are.
    settings = describe_machine(torch.device(benchmark.device))
    settings |= {"threads": 1, "rounds": benchmark.rounds}
    measure_groups(settings, groups, {"rows": COLUMNS}, benchmark.json)


# ---- on every rank ----


def exchange_on_ranks(
    device: torch.device, case: Case, dtype: str, rounds: int
) -> Iterator[list[Row]]:
    """Yields the rows of one case in one dtype after every round; runs on every rank."""
    mesh = build_mesh(MeshConfig(ep=dist.get_world_size()), device.type)
    problems = split_problem(build_problem(case, DTYPES[dtype], device))

    # Three timed jobs for each layer.
    jobs: list[Job] = []
    bytes_by_layer: dict[str, Row] = {}
    for name in LAYERS:
        layer_jobs, bytes_by_layer[name] = build_layer_jobs(name, problems, mesh, device)
        jobs += layer_jobs

    def describe(times: Sequence[Mapping[str, float]]) -> list[Row]:
        rows: list[Row] = []
        for name in LAYERS:
            rows.append({"layer": name, **describe_layer(name, times), **bytes_by_layer[name]})
        return rows

    return rows_by_round(measure_together(jobs, rounds, device), describe)


class Problems(NamedTuple):
    """The tensors of a case as each job takes them.

    Tokens are routed in one group for each rank in all of them.

    Attributes:
        one_process: For one process with the work of all ranks.
        rank: This rank's tokens and this rank's experts.
    """

    one_process: Problem
    rank: Problem


def split_problem(problem: Problem) -> Problems:
    """Returns the parts of a problem for this rank."""
    rank = dist.get_rank()
    num_ranks = dist.get_world_size()
    case = problem.case
    x = rearrange(problem.x.detach(), "1 (p s) d -> p s d", p=num_ranks)
    gradient = rearrange(problem.gradient.detach(), "1 (p s) d -> p s d", p=num_ranks)

    # One group of tokens for each rank.
    group_case = dataclasses.replace(case, tokens=case.tokens // num_ranks)
    one_process = dataclasses.replace(
        problem, case=group_case, x=x.clone().requires_grad_(), gradient=gradient.clone()
    )

    # This rank's group, and this rank's experts.
    rank_experts = case.num_experts // num_ranks
    experts = slice(rank * rank_experts, (rank + 1) * rank_experts)
    rank_problem = dataclasses.replace(
        one_process,
        x=x[rank : rank + 1].clone().requires_grad_(),
        gradient=gradient[rank : rank + 1].clone(),
        first=problem.first[experts].clone(),
        down=problem.down[experts].clone(),
    )
    return Problems(one_process, rank_problem)


def build_layer_jobs(
    name: str, problems: Problems, mesh: Mesh, device: torch.device
) -> tuple[list[Job], Row]:
    """Returns the jobs of one of `LAYERS`, and the bytes that it sends.

    The jobs are the layer over all ranks (`name`), one process for all tokens (`name/one`), and the
    same exchange with nothing around it (`name/bare`).
    """
    # Two layers over the same weights.
    settings = LAYERS[name]
    alone = build_layer(problems.one_process, *settings)
    parallel = build_layer(problems.rank, *settings)
    parallel.set_parallel_axes(mesh.ep, None)

    # Watch one pass, to repeat its exchanges and to count its bytes.
    with record_transfers() as transfers:
        y, router = parallel(problems.rank.x)
        y.backward(problems.rank.gradient)
    row_exchanges: list[Callable[[], object]] = []
    for transfer in transfers:
        if transfer.is_rows:
            row_exchanges.append(transfer.repeat(device))

    jobs = [
        _pass_job(f"{name}/one", alone, problems.one_process),
        Job(f"{name}/bare", partial(_run_all, row_exchanges)),
        _pass_job(name, parallel, problems.rank),
    ]
    if dist.get_rank() != 0:
        jobs[0] = Job(f"{name}/one", None)
    return jobs, describe_bytes(transfers, router, problems.rank)


def _pass_job(name: str, layer: SparseFeedForward, problem: Problem) -> Job:
    """Returns the forward and backward pass of a layer as a job."""

    def run() -> None:
        layer(problem.x)[0].backward(problem.gradient)

    def clear() -> None:
        layer.zero_grad()
        problem.x.grad = None

    return Job(name, run, clear)


def _run_all(functions: Sequence[Callable[[], object]]) -> None:
    for function in functions:
        function()


def describe_bytes(transfers: Sequence[Transfer], router: RouterOutput, problem: Problem) -> Row:
    """Returns the bytes that leave for other ranks, of all ranks together, and the minimum.

    The minimum is one row for every accepted choice with a remote expert, once each way, in both
    passes.
    """
    rank_experts = problem.case.num_experts // dist.get_world_size()
    load = router.stats.accepted_load.clone()

    # This rank's bytes of rows, bytes of counts, and smallest possible bytes of rows.
    row_bytes = sum(transfer.bytes_away for transfer in transfers if transfer.is_rows)
    count_bytes = sum(transfer.bytes_away for transfer in transfers if not transfer.is_rows)
    is_elsewhere = router.plan.expert_index // rank_experts != dist.get_rank()
    num_away = int((router.plan.accepted & is_elsewhere).sum())
    fewest_bytes = 4 * num_away * problem.case.d_model * problem.x.element_size()

    # The same for all ranks, with the load of every expert.
    numbers = torch.tensor([row_bytes, count_bytes, fewest_bytes], device=load.device)
    total = torch.cat([numbers, load])
    dist.all_reduce(total)
    row_bytes, count_bytes, fewest_bytes = total[:3].tolist()
    load_by_rank = rearrange(total[3:], "(p e) -> p e", e=rank_experts).sum(dim=1).double()
    return {
        "row_bytes": row_bytes,
        "count_bytes": count_bytes,
        "fewest_bytes": fewest_bytes,
        "bytes_ratio": row_bytes / fewest_bytes,
        "fullest_rank": float(load_by_rank.max() / load_by_rank.mean()),
    }


def describe_layer(name: str, times: Sequence[Mapping[str, float]]) -> Row:
    """Returns the measured numbers of a layer; ratios are medians over rounds."""
    num_ranks = dist.get_world_size()
    # Times of the same round are compared, so that disturbances affect both.
    over_ideal: list[float] = []
    for round_ in times:
        bare = round_[f"{name}/bare"]
        over_ideal.append(round_[name] / (round_[f"{name}/one"] / num_ranks + bare))
    return {
        "ms": statistics.median(round_[name] for round_ in times),
        "one_process_ms": statistics.median(round_[f"{name}/one"] for round_ in times),
        "bare_ms": statistics.median(round_[f"{name}/bare"] for round_ in times),
        "over_ideal": statistics.median(over_ideal),
    }


# ---- the report as text ----

COLUMNS: Columns = (
    ("ranks", "ranks", ""),
    ("case", "case", ""),
    ("dtype", "dtype", ""),
    ("layer", "layer", ""),
    ("ms", "ms", ".1f"),
    ("one process", "one_process_ms", ".1f"),
    ("bare", "bare_ms", ".1f"),
    ("/ ideal", "over_ideal", ".2f"),
    ("fullest rank", "fullest_rank", ".2f"),
    ("bytes sent", "row_bytes", ",.0f"),
    ("/ fewest", "bytes_ratio", ".2f"),
)
