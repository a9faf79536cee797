"""An engine in a thread of its own, for requests that come from an event loop."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from moe.errors import MoEError
from moe.serving.engine import Answer, Engine, Piece
from moe.serving.sampling import Sampling

_log = logging.getLogger("uvicorn.error")

Pieces = asyncio.Queue[tuple[int, Piece]]
"""Pieces of the answers to some requests, with the index of the request, as they are generated."""


class BusyError(MoEError):
    """The engine takes no more requests."""


class EngineThread:
    """Answers the requests of an event loop, all of whose calls come from there."""

    def __init__(self, engine: Engine, *, max_open: int, timeout: float) -> None:
        """Starts the thread.

        Args:
            engine: Engine that answers the requests.
            max_open: Most open requests.
            timeout: Seconds for the last step, after which `stop` waits no longer.
        """
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._max_open = max_open
        self._timeout = timeout
        self._next_number = 0
        self._readers: dict[int, tuple[int, Pieces]] = {}
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.problem: str | None = None  # why the engine takes no requests
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Requests that wait, run, or whose answers are being read."""
        return len(self._readers)

    @contextmanager
    def answering(
        self,
        requests: Sequence[tuple[Sequence[int], Sampling]],
        *,
        stream: bool,
        num_likeliest: int,
    ) -> Iterator[Pieces]:
        """Yields the pieces of answers; requests that did not end in the block are cancelled.

        Args:
            requests: Encoder tokens and settings of each.
            stream: See `Engine.submit`.
            num_likeliest: See `Engine.submit`.

        Raises:
            BusyError: When too many requests are open, or the engine failed.
        """
        if self.problem is not None:
            raise BusyError(self.problem)
        if self.num_open + len(requests) > self._max_open:
            raise BusyError(
                f"{self.num_open} requests are open, of {self._max_open}. Try again later."
            )
        pieces: Pieces = asyncio.Queue()
        client = self._next_number
        numbers = range(client, client + len(requests))
        self._next_number += len(requests)
        options = {"client": client, "stream": stream, "num_likeliest": num_likeliest}
        for number, (tokens, sampling) in zip(numbers, requests, strict=True):
            self._readers[number] = number - client, pieces
            self._work.put(partial(self._engine.submit, number, tokens, sampling, **options))
        try:
            yield pieces
        finally:
            for number in numbers:
                del self._readers[number]
                self._work.put(partial(self._engine.cancel, number))

    def stop(self) -> None:
        """Ends the thread after the step that it computes, unless that is stuck."""
        self._work.put(None)
        self._thread.join(self._timeout)

    def _run(self) -> None:
        """Does what was asked for, then a step, until it is stopped or the engine fails."""
        try:
            while True:
                while self._engine.is_idle or not self._work.empty():
                    work = self._work.get()
                    if work is None:
                        return
                    work()
                pieces = self._step()
                if self._loop.is_closed():  # the step was stuck when the server ended
                    return
                self._loop.call_soon_threadsafe(self._deliver, pieces)
        except BaseException as error:
            _log.critical("The engine failed.", exc_info=error)
            self.problem = f"The engine has failed: {error!r}. Start the server again."
            self._loop.call_soon_threadsafe(self._fail, self.problem)

    def _step(self) -> list[Piece]:
        """Returns the pieces of a step; when it fails, errors for the requests that run."""
        try:
            return self._engine.step()
        except torch.AcceleratorError:  # the device computes nothing any more
            raise
        except Exception as error:
            _log.exception("The model failed.")
            return self._engine.abort(error)

    def _deliver(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if piece.number in self._readers:
                index, reader = self._readers[piece.number]
                reader.put_nowait((index, piece))

    def _fail(self, message: str) -> None:
        answers = [Answer(number, error=message) for number in self._readers]
        self._deliver([Piece(answer.number, -1, "", answer) for answer in answers])
