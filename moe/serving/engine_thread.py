"""An engine in a thread of its own, for requests that come from an event loop."""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from moe.errors import MoEError
from moe.serving.engine import Engine, Piece
from moe.serving.sampling import Sampling


class BusyError(MoEError):
    """The engine takes no more requests."""


class FailedError(RuntimeError):
    """The model failed on a request."""


class Submission(NamedTuple):
    """A request to the engine; the arguments of `Engine.submit`."""

    tokens: Sequence[int]
    sampling: Sampling
    stream: bool
    num_likeliest: int = 0


class Pieces:
    """Pieces of the answers to some requests, in the order in which they are generated."""

    def __init__(self, first: int) -> None:
        self.first = first
        self._arrived: asyncio.Queue[Piece | BaseException] = asyncio.Queue()

    async def next(self) -> tuple[int, Piece]:
        """Returns the number of a request, from 0, and the next piece of an answer.

        Raises:
            FailedError: When the model failed on one of them.
        """
        piece = await self._arrived.get()
        if isinstance(piece, BaseException):
            raise FailedError("The model failed.") from piece
        if piece.answer is not None and piece.answer.error is not None:
            raise FailedError(piece.answer.error)
        return piece.number - self.first, piece

    def put(self, piece: Piece | BaseException) -> None:
        """Adds a piece, or why there are no more."""
        self._arrived.put_nowait(piece)


class EngineThread:
    """Answers the requests of an event loop, all of whose calls come from there."""

    def __init__(self, engine: Engine, *, max_open: int, timeout: float) -> None:
        """Starts the thread.

        Args:
            engine: Engine that answers the requests.
            max_open: Most open requests.
            timeout: Seconds after which a step counts as stuck.
        """
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._max_open = max_open
        self._timeout = timeout
        self._failure: BaseException | None = None
        self._busy_since: float | None = None
        self._next_number = 0
        self._pieces: dict[int, Pieces] = {}
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Requests that wait, run, or whose answers are being read."""
        return len(self._pieces)

    @property
    def problem(self) -> str | None:
        """Why the engine takes no requests; None if it does."""
        if self._failure is not None:
            return f"The engine has failed: {self._failure!r}. Start the server again."
        since = self._busy_since
        if since is not None and time.monotonic() - since > self._timeout:
            return f"The engine has computed one step for more than {self._timeout:g} seconds."
        return None

    @contextmanager
    def answering(self, submissions: Sequence[Submission]) -> Iterator[Pieces]:
        """Yields the pieces of answers; requests that did not end in the block are cancelled.

        Raises:
            BusyError: When too many requests are open, or the engine failed.
        """
        if self.problem is not None:
            raise BusyError(self.problem)
        if self.num_open + len(submissions) > self._max_open:
            raise BusyError(
                f"{self.num_open} requests are open, of {self._max_open}. Try again later."
            )
        pieces = Pieces(self._next_number)
        numbered = dict(enumerate(submissions, start=self._next_number))
        self._next_number += len(submissions)
        self._pieces |= dict.fromkeys(numbered, pieces)

        for number, submission in numbered.items():
            options = submission._asdict()
            submit = partial(self._engine.submit, number, client=pieces.first, **options)
            self._work.put(submit)
        try:
            yield pieces
        finally:
            for number in numbered:
                del self._pieces[number]
                self._work.put(partial(self._engine.cancel, number))

    def stop(self) -> None:
        """Ends the thread after the step that it computes, unless that is stuck."""
        self._work.put(None)
        self._thread.join(self._timeout)

    def _run(self) -> None:
        """Works until it is stopped, or the engine fails."""
        try:
            self._work_until_stopped()
        except BaseException as error:
            logging.getLogger("uvicorn.error").critical("The engine failed.", exc_info=error)
            self._failure = error
            self._loop.call_soon_threadsafe(self._fail, error)

    def _work_until_stopped(self) -> None:
        """Does what was asked for, then a step, again and again."""
        while True:
            while self._engine.is_idle or not self._work.empty():
                self._busy_since = None
                work = self._work.get()
                self._busy_since = time.monotonic()
                if work is None:
                    return
                work()
            self._busy_since = time.monotonic()
            pieces = self._engine.step()
            if self._loop.is_closed():  # the step was stuck when the server ended
                return
            self._loop.call_soon_threadsafe(self._deliver, pieces)

    def _deliver(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if piece.number in self._pieces:
                self._pieces[piece.number].put(piece)

    def _fail(self, error: BaseException) -> None:
        for pieces in set(self._pieces.values()):
            pieces.put(error)
