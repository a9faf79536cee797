"""Pieces of experts' work on a CPU, and the threads that do them.

A piece is some rows of one expert. One piece per torch thread runs at a time, each on one core:
`cpu_experts.py` has the work of a piece.
"""

import functools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from operator import attrgetter
from typing import NamedTuple

import torch


class Piece(NamedTuple):
    """Rows `start` to `end` of one expert; `part` counts the pieces of that expert."""

    expert: int
    part: int
    start: int
    end: int

    @property
    def num_rows(self) -> int:
        """Rows of the piece."""
        return self.end - self.start


def split_rows(counts: list[int], most: int, least_pieces: int = 1) -> list[Piece]:
    """Returns each expert's rows in even pieces, the largest piece first.

    Args:
        counts: Rows of each expert.
        most: Rows in a piece.
        least_pieces: Pieces of an expert without rows: 1 if its gradient is to be filled, or 0.
    """
    # Borders are rounded down, so that pieces of an expert differ by one row at most.
    pieces: list[Piece] = []
    expert_start = 0
    for expert, count in enumerate(counts):
        num_parts = max(least_pieces, math.ceil(count / most))
        for part in range(num_parts):
            start = expert_start + count * part // num_parts
            end = expert_start + count * (part + 1) // num_parts
            pieces.append(Piece(expert, part, start, end))
        expert_start += count
    return sorted(pieces, key=attrgetter("num_rows"), reverse=True)


def run_pieces(run: Callable[[Piece], None], pieces: Iterable[Piece]) -> None:
    """Runs all pieces, as many at once as torch has threads, each of them on one core.

    After an error or Ctrl-C no new piece starts, and none is running when the error is raised.
    """
    queue = deque(pieces)

    def work() -> None:
        try:
            while (piece := _take(queue)) is not None:
                run(piece)
        except BaseException:
            queue.clear()
            raise

    num_threads = torch.get_num_threads()
    if num_threads == 1:
        with torch.autocast("cpu", enabled=False):
            work()
        return

    pool = _thread_pool(num_threads)
    if torch.is_inference_mode_enabled():
        # The mode belongs to a thread, and tensors of the mode can be changed within it only.
        work = torch.inference_mode()(work)

    jobs: list[Future[None]] = []
    try:
        for _ in range(num_threads):
            jobs.append(pool.submit(work))
        for job in jobs:
            job.result()
    except BaseException:
        queue.clear()
        wait(jobs)
        raise
    finally:
        # An error, its frame and the jobs would hold each other, and with them the workers.
        job = None
        jobs.clear()


def _take(queue: deque[Piece]) -> Piece | None:
    """Returns a piece that no worker has started; two workers never get the same one."""
    try:
        return queue.popleft()
    except IndexError:
        return None


@functools.lru_cache(maxsize=4)
def _thread_pool(num_threads: int) -> ThreadPoolExecutor:
    """Returns the workers for so many threads: each runs torch on one core and builds no graph.

    Workers for an unused number of threads end when the cache evicts them.
    """
    started = threading.Barrier(num_threads)

    def prepare() -> None:
        # A thread's first query sets its number of threads to the process's; trigger it now.
        torch.get_num_threads()
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)

    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="experts", initializer=prepare)
    try:
        # The barrier prevents a worker from taking two of these jobs, so all workers start now.
        for ready in [pool.submit(started.wait) for _ in range(num_threads)]:
            ready.result()
    except BaseException:
        # The system gives no more threads: waiting for them would prevent the process from ending.
        started.abort()
        raise
    finally:
        # The workers' setting is also what threads to come would inherit.
        torch.set_num_threads(num_threads)
    return pool


if hasattr(os, "register_at_fork"):  # threads do not survive a fork
    os.register_at_fork(after_in_child=_thread_pool.cache_clear)
