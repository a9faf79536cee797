"""Ranks of a benchmark: fresh processes on this machine that do every job together.

`record_transfers` records what they send each other.
"""

import contextlib
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.multiprocessing.spawn import start_processes

from benchmarks.timing import measure
from moe.kernels.host_memory import keep_freed_memory

_ANSWERS = "answers.jsonl"
_POLL = 0.5  # seconds


def _do_nothing() -> None:
    pass


class Job(NamedTuple):
    """Something to time.

    Attributes:
        name: As in the report.
        run: This rank's part; None for a rank that waits meanwhile.
        clear: Frees memory afterwards; not timed.
    """

    name: str
    run: Callable[[], object] | None
    clear: Callable[[], object] = _do_nothing


def run_ranks(
    function: Callable[..., Iterator[Any]], num_ranks: int, device_type: str, *arguments: Any
) -> Iterator[Any]:
    """Yields what `function(device, *arguments)` yields on the first rank.

    Every rank has one thread. The ranks end with the iterator.

    Args:
        function: Must be at module level, since the processes are spawned, and yield JSON data.
        num_ranks: Processes.
        device_type: `cpu` for gloo, `cuda` for NCCL with a GPU for each rank.
        arguments: Arguments that can be pickled.

    Raises:
        ProcessRaisedException: When a rank fails; the others are ended.
    """
    # Ranks meet, and the first one answers, through files of a folder.
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder, _ANSWERS)
        answers.touch()
        ranks: Any = start_processes(
            _run_rank,
            (function, num_ranks, folder, device_type, arguments),
            nprocs=num_ranks,
            join=False,
            start_method="forkserver",
        )
        try:
            num_read = 0
            has_ended = False
            while not has_ended:
                has_ended = ranks.join(timeout=_POLL)
                lines = answers.read_text(encoding="utf-8").split("\n")[:-1]  # the last may be torn
                yield from map(json.loads, lines[num_read:])
                num_read = len(lines)
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()


def _run_rank(
    rank: int,
    function: Callable[..., Iterator[Any]],
    num_ranks: int,
    folder: str,
    device_type: str,
    arguments: Sequence[Any],
) -> None:
    """Runs the function on one rank; the first writes its answers into the folder."""
    # Ranks share the cores of this machine: one thread each. Like training, they keep freed memory.
    torch.set_num_threads(1)
    keep_freed_memory()
    backend = "gloo"
    device = torch.device(device_type)
    if device_type == "cuda":
        backend = "nccl"
        device = torch.device(device_type, rank)
        torch.cuda.set_device(device)

    meeting = f"file://{folder}/meeting"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=num_ranks)
    try:
        for answer in function(device, *arguments):
            if rank == 0:
                with Path(folder, _ANSWERS).open("a", encoding="utf-8") as answers:
                    answers.write(json.dumps(answer) + "\n")
    finally:
        dist.destroy_process_group()


def measure_together(
    jobs: Sequence[Job], rounds: int, device: torch.device
) -> Iterator[dict[str, float]]:
    """Yields the milliseconds of every job on the slowest rank, round by round.

    A first round is not counted. The order is redrawn for every round, and all ranks begin a job
    together.
    """
    generator = random.Random(0)  # the same order on every rank
    names = [job.name for job in jobs]
    for round_index in range(rounds + 1):
        rank_times: dict[str, float] = {}
        for job in generator.sample(jobs, len(jobs)):
            # All ranks begin together: a rank that waits for another would measure that one.
            dist.barrier()
            rank_times[job.name] = 0.0 if job.run is None else measure(job.run, device)
            job.clear()

        # A job takes as long as on its slowest rank.
        ordered = [rank_times[name] for name in names]
        slowest = torch.tensor(ordered, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        is_warm_up = round_index == 0
        if not is_warm_up:
            yield dict(zip(names, slowest.tolist(), strict=True))


class Transfer(NamedTuple):
    """One all-to-all of a rank.

    Attributes:
        shape: Shape of the sent tensor.
        dtype: Its dtype.
        send_splits: Rows for each rank; None for equally many.
        receive_splits: Rows from each rank; None likewise.
        bytes_away: Bytes that leave for other ranks.
    """

    shape: torch.Size
    dtype: torch.dtype
    send_splits: list[int] | None
    receive_splits: list[int] | None
    bytes_away: int

    @property
    def is_rows(self) -> bool:
        """Whether the tensors are rows, not their counts."""
        return self.dtype.is_floating_point

    def repeat(self, device: torch.device) -> Callable[[], object]:
        """Returns a function that does the same exchange with nothing around it."""
        # Values do not matter, only how many there are.
        num_received = self.shape[0]
        if self.receive_splits is not None:
            num_received = sum(self.receive_splits)

        x = torch.randn(self.shape, device=device).to(self.dtype)
        buffer = x.new_empty(num_received, *self.shape[1:])
        return partial(dist.all_to_all_single, buffer, x, self.receive_splits, self.send_splits)


@contextlib.contextmanager
def record_transfers() -> Iterator[list[Transfer]]:
    """Gives a list of the all-to-alls that this rank takes part in inside the block."""
    transfers: list[Transfer] = []
    all_to_all_single = dist.all_to_all_single

    def record(
        output: Tensor,
        input: Tensor,  # torch's name
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        # Rows that a rank sends to itself do not leave.
        rank = dist.get_rank(group)
        num_kept = input.shape[0] // dist.get_world_size(group)
        if input_split_sizes:
            num_kept = input_split_sizes[rank]
        row_bytes = input[:1].numel() * input.element_size()

        transfers.append(
            Transfer(
                shape=input.shape,
                dtype=input.dtype,
                send_splits=input_split_sizes,
                receive_splits=output_split_sizes,
                bytes_away=(input.shape[0] - num_kept) * row_bytes,
            )
        )
        return all_to_all_single(
            output, input, output_split_sizes, input_split_sizes, group=group, async_op=async_op
        )

    with mock.patch.object(dist, "all_to_all_single", record):
        yield transfers
