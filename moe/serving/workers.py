"""Several processes that answer one stream of requests; each loads the model."""

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from multiprocessing.queues import Queue
from queue import Empty
from typing import Any

import torch

from moe.errors import DistributedError
from moe.serving.batch_generator import BatchGenerator, Item
from moe.serving.engine import Answer

_AHEAD = 1_024
"""Most requests of a worker that were read and not yet returned."""

_WAIT_SECONDS = 1.0
"""How often a waiting process looks whether the others are alive."""

_PRELOADED = ["moe.checkpoint.loading", "moe.serving.batch_generator"]


def map_over_workers(
    load: Callable[[], BatchGenerator], numbered: Iterable[tuple[int, Item]], num_workers: int
) -> Iterator[Answer]:
    """Yields the answer to each request in order, as `BatchGenerator.map_numbered` does.

    Args:
        load: Makes the generator in each process; it can be pickled.
        numbered: Requests and their numbers.
        num_workers: Number of processes, which share the threads of this one.

    Raises:
        DistributedError: When a worker ends early.
    """
    # Forked from a server that imports torch once for all of them.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    tasks: Queue[Any] = context.Queue()
    answers: Queue[Any] = context.Queue()
    tasks.cancel_join_thread()  # an early end does not wait for workers to read the rest
    threads = max(1, torch.get_num_threads() // num_workers)
    workers = []
    for _ in range(num_workers):
        worker = context.Process(target=_work, args=(load, threads, tasks, answers), daemon=True)
        worker.start()
        workers.append(worker)

    try:
        source = iter(numbered)
        order: deque[int] = deque()
        waiting: dict[int, Answer] = {}
        exhausted = False
        while order or not exhausted:
            room = _AHEAD * num_workers - len(order)
            if not exhausted and room > 0:
                chunk = list(islice(source, room))
                exhausted = len(chunk) < room
                for task in chunk:
                    order.append(task[0])
                    tasks.put(task)
            if order:
                answer = _receive(answers, workers)
                waiting[answer.number] = answer
            while order and order[0] in waiting:
                yield waiting.pop(order.popleft())
        for _ in workers:
            tasks.put(None)
        for worker in workers:
            worker.join()
    finally:
        for worker in workers:
            worker.terminate()


def _receive(answers: "Queue[Any]", workers: list[Any]) -> Answer:
    """Returns the next answer; an exception of a worker is raised here."""
    while True:
        try:
            answer = answers.get(timeout=_WAIT_SECONDS)
        except Empty:
            ended = [worker for worker in workers if not worker.is_alive()]
            if ended:
                raise DistributedError(
                    f"{len(ended)} of {len(workers)} workers ended with exit code {ended[0].exitcode}. Their "
                    "requests are lost; continue with --resume, with fewer --workers if memory was short."
                ) from None
            continue
        if isinstance(answer, Exception):
            raise answer
        return answer


def _work(
    load: Callable[[], BatchGenerator], threads: int, tasks: "Queue[Any]", answers: "Queue[Any]"
) -> None:
    """Answers tasks until one is None, or the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()
    try:
        generator = load()
        engine = generator.engine
        while parent is not None and parent.is_alive():
            # Enough tasks to group them by length; wait for one only without other work.
            while len(engine.waiting) < 2 * engine.max_batch:
                try:
                    task = tasks.get(block=engine.is_idle, timeout=_WAIT_SECONDS)
                except Empty:
                    break
                if task is None:  # all answers were received
                    return
                for refusal in generator.submit([task]):
                    answers.put(refusal)
            for piece in engine.step():
                if piece.answer is not None:
                    answers.put(piece.answer)
        answers.cancel_join_thread()  # nobody reads them
    except Exception as error:
        answers.put(error)
