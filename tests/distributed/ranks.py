"""Starts a function in several processes that exchange over gloo, and brings their answers back."""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor

from tests.processes import fork_context
from tests.progress import WINDOW, Progress

MEETING = timedelta(seconds=900)  # until all are there; the machine may be busy


def run_ranks(function, num_ranks, folder, *arguments):
    """Returns what `function(rank, num_ranks, *arguments)` returned on each rank; kills all of them
    when none computes any more.

    The processes come of a server that has imported the library and done nothing else, so that
    `function` must stand in a module. They meet in a file: no port is needed.
    """
    fork_context()
    context = mp.start_processes(
        _rank,
        (function, num_ranks, str(folder), arguments),
        nprocs=num_ranks,
        join=False,
        start_method="forkserver",
    )
    progress = Progress(context.pids())
    try:
        while not context.join(timeout=1):  # raises what a rank raised
            hang = progress.has_stopped()
            assert not hang, f"{num_ranks} ranks computed nothing for {WINDOW} seconds"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(num_ranks)]


def _rank(rank, function, num_ranks, folder, arguments):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/meeting", num_ranks)
    store.set_timeout(MEETING)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)

    # A rank that failed now would take away what another still connects to.
    if store.add("connected", 1) == num_ranks:
        store.set("all_connected", "1")
    store.wait(["all_connected"])

    try:
        torch.save(function(rank, num_ranks, *arguments), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def whole(tensor):
    """Returns a copy of a tensor, whole on all ranks, which call this together."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
