"""Ranks of a benchmark: fresh processes on this machine that do every job together, and what they
send each other.
"""

import contextlib
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.multiprocessing.spawn import start_processes

from benchmarks.timing import measure


class Job(NamedTuple):
    """Something to time.

    Attributes:
        name: As in the report.
        run: This rank's part; None for a rank that waits meanwhile.
        clear: Gives memory back afterwards; not timed.
    """

    name: str
    run: Callable[[], object] | None
    clear: Callable[[], object] = lambda: None


def run_ranks(
    function: Callable[..., Any], num_ranks: int, device_type: str, *arguments: Any
) -> Any:
    """Returns what `function(device, *arguments)` returned on the first rank; every rank has one
    thread.

    Args:
        function: Of a module, since the processes are fresh; what it returns must go into JSON.
        num_ranks: Processes.
        device_type: `cpu` for gloo, `cuda` for NCCL with a GPU for each rank.
        arguments: What pickle takes.

    Raises:
        ProcessRaisedException: When a rank fails; the others are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        start_processes(
            _rank,
            (function, num_ranks, folder, device_type, arguments),
            nprocs=num_ranks,
            start_method="forkserver",
        )
        return json.loads((Path(folder) / "answer.json").read_text(encoding="utf-8"))


def _rank(
    rank: int,
    function: Callable[..., Any],
    num_ranks: int,
    folder: str,
    device_type: str,
    arguments: Sequence[Any],
) -> None:
    """Runs on a rank."""
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend, meeting = "nccl" if device.type == "cuda" else "gloo", f"file://{folder}/meeting"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=num_ranks)
    try:
        answer = function(device, *arguments)
        if rank == 0:
            (Path(folder) / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def measure_together(
    jobs: Sequence[Job], rounds: int, device: torch.device
) -> list[dict[str, float]]:
    """Returns the milliseconds of every job on the slowest rank, round by round.

    A first round is not counted. The order is drawn anew for every round, and all ranks begin a job
    together.
    """
    order, times = random.Random(0), []
    for _ in range(rounds + 1):
        found = {}
        for job in order.sample(jobs, len(jobs)):
            dist.barrier()
            found[job.name] = 0.0 if job.run is None else measure(job.run, device)
            job.clear()
        slowest = torch.tensor(
            [found[job.name] for job in jobs], dtype=torch.float64, device=device
        )
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(dict(zip((job.name for job in jobs), slowest.tolist(), strict=True)))
    return times[1:]


class Sending(NamedTuple):
    """One all-to-all of a rank.

    Attributes:
        shape: Of what is sent.
        dtype: Of it.
        sent: Rows for each rank; None for equally many.
        received: Rows from each rank; None likewise.
        away: Bytes that leave for other ranks.
    """

    shape: torch.Size
    dtype: torch.dtype
    sent: list[int] | None
    received: list[int] | None
    away: int

    @property
    def is_rows(self) -> bool:
        """Whether it is rows and not their counts."""
        return self.dtype.is_floating_point

    def repeat(self, device: torch.device) -> Callable[[], object]:
        """Returns a function that does the same exchange with nothing around it."""
        x = torch.randn(self.shape, device=device).to(self.dtype)
        rows = self.shape[0] if self.received is None else sum(self.received)
        buffer = x.new_empty(rows, *self.shape[1:])
        return lambda: dist.all_to_all_single(buffer, x, self.received, self.sent)


@contextlib.contextmanager
def sendings() -> Iterator[list[Sending]]:
    """Gives a list of the all-to-alls that this rank takes part in inside the block."""
    found: list[Sending] = []
    exchange = dist.all_to_all_single

    def note(
        output: Tensor,
        input: Tensor,  # torch's name
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        kept = input_split_sizes[rank] if input_split_sizes else input.shape[0] // size
        away = (input.shape[0] - kept) * input[:1].numel() * input.element_size()
        found.append(Sending(input.shape, input.dtype, input_split_sizes, output_split_sizes, away))
        return exchange(
            output, input, output_split_sizes, input_split_sizes, group=group, async_op=async_op
        )

    with mock.patch.object(dist, "all_to_all_single", note):
        yield found
