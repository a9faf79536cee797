"""An engine in a thread of its own, for requests that come from an event loop."""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

from moe.errors import MoEError
from moe.serving.engine import Engine, Piece
from moe.serving.sampling import Sampling

T = TypeVar("T")


class BusyError(MoEError):
    """More requests are open than the queue holds."""


class FailedError(RuntimeError):
    """The model failed on a request."""


class Submission(NamedTuple):
    """A request to the engine; the arguments of `Engine.submit`."""

    tokens: Sequence[int]
    sampling: Sampling
    stream: bool


class Pieces:
    """Pieces of the answers to some requests, in the order in which they are generated."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._arrived: asyncio.Queue[Piece | Exception] = asyncio.Queue()

    async def next(self) -> tuple[int, Piece]:
        """Returns the number of a request, from 0, and the next piece of an answer.

        Raises:
            FailedError: When the model failed on one of them.
        """
        piece = await self._arrived.get()
        if isinstance(piece, Exception):
            raise FailedError("The model failed.") from piece
        if piece.answer is not None and piece.answer.error is not None:
            raise FailedError(piece.answer.error)
        return piece.number - self._first, piece

    def put(self, piece: Piece | Exception) -> None:
        """Adds a piece, or why there are no more."""
        self._arrived.put_nowait(piece)


class EngineThread:
    """Answers the requests of an event loop, all of whose calls come from there."""

    def __init__(
        self, engine: Engine, build_engine: Callable[[], Engine], *, max_open: int
    ) -> None:
        """Starts the thread.

        Args:
            engine: Engine that answers the requests.
            build_engine: Returns a different one after an error.
            max_open: Most open requests.
        """
        self._build_engine = build_engine
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._max_open = max_open
        self._next_number = 0
        self._pieces: dict[int, Pieces] = {}
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Requests that wait, run, or whose answers are being read."""
        return len(self._pieces)

    @contextmanager
    def answering(self, submissions: Sequence[Submission]) -> Iterator[Pieces]:
        """Yields the pieces of answers; requests that did not end in the block are cancelled.

        Raises:
            BusyError: When too many requests are open.
        """
        if self.num_open + len(submissions) > self._max_open:
            raise BusyError(
                f"{self.num_open} requests are open, of {self._max_open}. Try again later."
            )
        pieces = Pieces(self._next_number)
        numbered = dict(enumerate(submissions, start=self._next_number))
        self._next_number += len(submissions)
        self._pieces |= dict.fromkeys(numbered, pieces)

        for number, submission in numbered.items():
            self._work.put(partial(self._submit, number, submission))
        try:
            yield pieces
        finally:
            for number in numbered:
                del self._pieces[number]
                self._work.put(partial(self._cancel, number))

    async def call(self, function: Callable[[], T]) -> T:
        """Returns the result of a function that uses the model, which runs between two steps."""
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._work.put(work)
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """Ends the thread after the step that it computes."""
        self._work.put(None)
        self._thread.join()

    def _submit(self, number: int, submission: Submission) -> None:
        tokens, sampling, stream = submission
        self._engine.submit(number, tokens, sampling, stream=stream)

    def _cancel(self, number: int) -> None:
        self._engine.cancel(number)

    def _run(self) -> None:
        """Works until it is stopped: what was asked for, then a step."""
        while True:
            try:
                while self._engine.is_idle or not self._work.empty():
                    work = self._work.get()
                    if work is None:
                        return
                    work()
                pieces = self._engine.step()
            except Exception as error:
                # Its state is unknown.
                self._engine = self._build_engine()
                self._loop.call_soon_threadsafe(self._fail, error)
            else:
                self._loop.call_soon_threadsafe(self._deliver, pieces)

    def _deliver(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if piece.number in self._pieces:
                self._pieces[piece.number].put(piece)

    def _fail(self, error: Exception) -> None:
        for pieces in set(self._pieces.values()):
            pieces.put(error)
