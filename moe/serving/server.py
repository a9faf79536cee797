"""An HTTP server for one model: OpenAI's completions API by continuous batching.

Starlette routes the requests, uvicorn speaks HTTP, and engine_thread.py computes the answers.
"""

import asyncio
import json
import math
import signal
import socket
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from moe.checks import check, is_kind, shown
from moe.errors import ConfigError, DataError, MoEError
from moe.parsing import parse_json
from moe.serving.batch_generator import BatchGenerator, encode_items
from moe.serving.completions import Completion, Envelope, Prompt, parse_completion
from moe.serving.engine import Piece
from moe.serving.engine_thread import BusyError, EngineThread, Pieces
from moe.serving.sampling import sampling_of

_MOST_BYTES = 4 << 20
"""Longest body of a request."""

_LATE = "The answer took too long."
_FAILED = "The server failed; its log says why."


class CompletionServer:
    """Answers the requests for one model."""

    def __init__(
        self,
        generator: BatchGenerator,
        name: str,
        *,
        max_open: int = 1024,
        timeout: float = 120.0,
        hosts: Sequence[str] = ("*",),
    ) -> None:
        """Prepares a model.

        Args:
            generator: The model with the settings of requests without their own; no answer is
                longer.
            name: Its name in the API.
            max_open: Most requests that wait, run, or whose answers are being read.
            timeout: Seconds after which a slow sender, an unfinished answer or a client that stops
                reading is dropped.
            hosts: Names of the server in the header `Host`; `*` for any.
        """
        self._generator = generator
        self._tokenizer = generator.tokenizer
        self._vocab_size = generator.engine.model.get_input_embeddings().weight.shape[0]
        self._name = name
        self._max_open = max_open
        self._timeout = timeout
        self._hosts = hosts
        self._thread: EngineThread

    def app(self) -> ASGIApp:
        """Returns the ASGI application."""
        description = {"id": self._name, "object": "model", "created": 0, "owned_by": "stmoe"}
        models = {"object": "list", "data": [description]}
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", JSONResponse(models), methods=["GET"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ],
            exception_handlers={
                MoEError: partial(_error, 400),
                BusyError: partial(_error, 503),
                HTTPException: _refuse,
                ClientDisconnect: partial(_error, 499),
                Exception: partial(_error, 500),
            },
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=self._hosts)],
            lifespan=self._lifespan,
        )

    def uvicorn_config(self) -> uvicorn.Config:
        """Returns how uvicorn runs the application."""
        return uvicorn.Config(
            self.app(),
            http=type("TimedProtocol", (_TimedProtocol,), {"timeout": self._timeout}),
            ws="none",
            limit_concurrency=2 * self._max_open,
            timeout_graceful_shutdown=math.ceil(self._timeout),
            access_log=False,
            log_level="warning",
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._thread = EngineThread(
            self._generator.engine, max_open=self._max_open, timeout=self._timeout
        )
        yield
        self._thread.stop()

    # -----------------------------------------------------------------------
    # Routes

    async def _health(self, request: Request) -> Response:
        state = {"open": self._thread.num_open, "max_open": self._max_open}
        problem = self._thread.problem
        return JSONResponse({**state, "problem": problem}, 200 if problem is None else 503)

    async def _complete(self, request: Request) -> ASGIApp:
        body = await self._read(request)
        completion = parse_completion(body, self._generator.sampling, self._max_open)
        if completion.model not in (None, self._name):
            raise HTTPException(
                404, f"model is {shown(completion.model)}; expected {self._name!r}."
            )
        prompts = await self._finish(self._tokenize(completion.prompts), request.receive)
        of_choices = [tokens for tokens in prompts for _ in range(completion.num_choices)]
        requests = [
            (tokens, sampling_of(completion.sampling, choice))
            for choice, tokens in enumerate(of_choices)
        ]
        options = {"stream": completion.stream, "num_likeliest": completion.num_likeliest}
        envelope = Envelope(completion, self._name, self._tokenizer, sum(map(len, prompts)))

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            with self._thread.answering(requests, **options) as pieces:
                if completion.stream:
                    events = self._events(completion, envelope, len(requests), pieces)
                    response: Response = StreamingResponse(events, media_type="text/event-stream")
                else:
                    whole = self._whole(envelope, len(requests), pieces)
                    response = JSONResponse(await self._finish(whole, receive))
                await response(scope, receive, send)

        return respond

    # -----------------------------------------------------------------------
    # Requests

    async def _read(self, request: Request) -> dict[str, Any]:
        """Returns the JSON object of a body."""
        # Pages of other sites may post any other type without asking this server.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, f"content-type is {shown(kind)}; expected application/json.")
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > _MOST_BYTES:
                        raise HTTPException(413, f"The body is longer than {_MOST_BYTES} bytes.")
        except TimeoutError as error:
            raise HTTPException(408, "The body came too late.", {"connection": "close"}) from error
        try:
            text = body.decode()
        except UnicodeDecodeError as error:
            raise ConfigError("The body is not UTF-8.") from error
        value = parse_json(text, where="The body", advice="Send JSON.")
        check(isinstance(value, dict), "The body", value, 'an object like {"prompt": "..."}')
        return value

    async def _tokenize(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Returns the tokens of prompts; the prompts of all requests take turns."""
        return [await asyncio.to_thread(self._tokens, prompt) for prompt in prompts]

    def _tokens(self, prompt: Prompt) -> list[int]:
        """Returns the tokens of a prompt, or raises an error that says what is wrong with it."""
        longest = self._generator.max_input
        if isinstance(prompt, str):
            (tokens,) = encode_items(self._tokenizer, [prompt], longest, self._generator.languages)
            if isinstance(tokens, DataError):
                raise tokens
            return tokens
        if len(prompt) > longest:
            raise ConfigError(f"prompt has {len(prompt)} tokens; expected at most {longest}.")
        most = self._vocab_size - 1
        holds = all(is_kind(token, int) and 0 <= token <= most for token in prompt)
        check(holds, "prompt", prompt, f"a list of tokens between 0 and {most}")
        return prompt

    # -----------------------------------------------------------------------
    # Answers

    async def _until_ended(self, number: int, pieces: Pieces) -> AsyncIterator[tuple[int, Piece]]:
        """Yields the pieces of some answers until all have ended."""
        deadline = asyncio.get_running_loop().time() + self._timeout
        num_ended = 0
        while num_ended < number:
            try:
                async with asyncio.timeout_at(deadline):
                    index, piece = await pieces.get()
            except TimeoutError as error:
                raise HTTPException(504, _LATE) from error
            if piece.answer is not None and piece.answer.error is not None:
                raise HTTPException(500, _FAILED)
            num_ended += piece.answer is not None
            yield index, piece

    async def _finish(self, work: Coroutine[Any, Any, Any], receive: Receive) -> Any:
        """Returns the result of work, which is cancelled when it takes too long or the client leaves.

        Raises:
            ClientDisconnect: When it left.
            HTTPException: When it took too long.
        """
        task = asyncio.ensure_future(work)
        left = asyncio.ensure_future(receive())
        try:
            await asyncio.wait(
                [task, left], timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if not task.done():
                raise ClientDisconnect if left.done() else HTTPException(504, _LATE)
            return task.result()
        finally:
            task.cancel()
            left.cancel()

    async def _whole(self, envelope: Envelope, number: int, pieces: Pieces) -> dict[str, Any]:
        """Returns all answers."""
        by_answer: list[list[Piece]] = [[] for _ in range(number)]
        async for index, piece in self._until_ended(number, pieces):
            by_answer[index].append(piece)
        choices = [envelope.choice(index, parts) for index, parts in enumerate(by_answer)]
        return envelope.wrap(choices, sum(map(len, by_answer)))

    async def _events(
        self, completion: Completion, envelope: Envelope, number: int, pieces: Pieces
    ) -> AsyncIterator[str]:
        """Yields the pieces of all answers as server-sent events."""
        num_tokens = 0
        try:
            async for index, piece in self._until_ended(number, pieces):
                num_tokens += 1
                has_each = completion.return_token_ids or completion.sampling.scores
                if piece.text or piece.answer is not None or has_each:
                    yield _event(envelope.wrap([envelope.choice(index, [piece])]))
        except HTTPException as error:
            yield _event(_error_body(error.status_code, error.detail))
            return
        if completion.include_usage:
            yield _event(envelope.wrap([], num_tokens))
        yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _error_body(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def _error(status: int, request: Request, error: Exception) -> Response:
    headers = {"retry-after": "1"} if status == 503 else {}
    message = str(error) if status != 500 else _FAILED
    return JSONResponse(_error_body(status, message), status, headers)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(_error_body(error.status_code, message), error.status_code, error.headers)


# ---------------------------------------------------------------------------
# Connections


class _TimedProtocol(H11Protocol):
    """Closes connections that wait for their client, except for a body to answer, for too long.

    The client has to finish its headers, read its answer, and finish a body that was refused.
    """

    timeout: float
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_clock()

    def _watch(self) -> None:
        """Starts the clock when the server waits for the client, and stops it when it does not."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering and not self.flow.write_paused:
            self._stop_clock()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.timeout, self.transport.abort)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def run_server(server: CompletionServer, listener: socket.socket) -> None:
    """Serves until SIGINT or SIGTERM; then answers the requests that are open."""
    # uvicorn handles both signals, and raises them again when it has ended.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    uvicorn.Server(server.uvicorn_config()).run(sockets=[listener])
