"""Answers a stream of texts in order, many at a time; engine.py computes the tokens."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from transformers import PreTrainedModel

from moe.checks import check_integer, shown
from moe.serving.engine import Answer, Engine, Piece
from moe.serving.sampling import Sampling

_AHEAD = 32
"""Requests read before the first unanswered one is answered, as a multiple of the batch."""


@dataclass(frozen=True)
class Request:
    """A text with its own settings.

    Attributes:
        text: Input of the encoder.
        sampling: Settings of the answer; None for those of the generator.
    """

    text: str
    sampling: Sampling | None = None


class BatchGenerator:
    """Answers any number of texts with an encoder-decoder, by continuous batching.

    Example:
        generator = BatchGenerator(model, tokenizer, max_new_tokens=128)
        for answer in generator.map(open("questions.txt")):
            print(answer.text)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        max_batch: int = 32,
        max_input: int = 512,
        on_piece: Callable[[Piece], None] | None = None,
        **sampling: Any,
    ) -> None:
        """Prepares a model, which must not drop tokens.

        Args:
            model: An encoder-decoder of transformers, dense or sparse.
            tokenizer: Its tokenizer.
            max_batch: Most requests that run at a time.
            max_input: Most tokens of a text. A longer one is refused, alone.
            on_piece: Called with each token of every answer as soon as it is known.
            sampling: Fields of `Sampling`, for requests without their own. The defaults are those of
                `model.generation_config` for temperature, top_k and top_p, if it samples.

        Raises:
            ConfigError: When the model or a setting is not supported.
        """
        check_integer("max_input", max_input, least=1)
        self.engine = Engine(model, tokenizer, max_batch=max_batch, stream=on_piece is not None)
        self.tokenizer = tokenizer
        self.max_input = max_input
        self.sampling = replace(default_sampling(model), **sampling)
        self.on_piece = on_piece

    def map(self, texts: Iterable[str | Request], *, first: int = 0) -> Iterator[Answer]:
        """Yields the answer to each text, in order.

        Texts are read as they are needed, so an endless iterator works. Every answer depends only
        on its text, its settings and its number.

        Args:
            texts: Texts, or requests with their own settings.
            first: Number of the first one. A stream that is resumed there has the same answers.
        """
        engine = self.engine
        numbered = enumerate(texts, start=first)
        answers: dict[int, Answer] = {}
        next_number = first
        num_read = first
        exhausted = False
        while True:
            # As many texts ahead as bucketing by length needs, but not without limit.
            room = _AHEAD * engine.max_batch - (num_read - next_number)
            if not exhausted and len(engine.waiting) < 2 * engine.max_batch and room > 0:
                size = min(room, 4 * engine.max_batch)
                chunk = list(islice(numbered, size))
                exhausted = len(chunk) < size
                num_read += len(chunk)
                for answer in self.submit(chunk):
                    answers[answer.number] = answer

            for piece in engine.step():
                if self.on_piece is not None:
                    self.on_piece(piece)
                if piece.answer is not None:
                    answers[piece.number] = piece.answer

            while next_number in answers:
                yield answers.pop(next_number)
                next_number += 1
            if exhausted and next_number == num_read:
                return

    def submit(self, requests: list[tuple[int, str | Request]]) -> list[Answer]:
        """Queues numbered requests, and returns refusals of those that cannot be answered."""
        refused = []
        valid: list[tuple[int, Request]] = []
        for number, item in requests:
            request = item if isinstance(item, Request) else Request(item)
            if isinstance(request.text, str) and request.text.strip():
                valid.append((number, request))
            else:
                error = f"The text is {shown(request.text)}; expected one that is not empty."
                refused.append(Answer(number, error=error))
        if not valid:
            return refused

        texts = [request.text for _, request in valid]
        all_tokens = self.tokenizer(texts, verbose=False)["input_ids"]
        for (number, request), tokens in zip(valid, all_tokens, strict=True):
            if len(tokens) > self.max_input:
                error = (
                    f"The text has {len(tokens)} tokens; expected at most max_input, {self.max_input}. Shorten "
                    "it, or set max_input higher."
                )
                refused.append(Answer(number, error=error))
            else:
                self.engine.submit(number, tokens, request.sampling or self.sampling)
        return refused


def default_sampling(model: PreTrainedModel) -> Sampling:
    """Returns the settings of a model's `generation_config` that apply here."""
    settings: Any = model.generation_config
    if not settings.do_sample:
        return Sampling()
    return Sampling(
        temperature=1.0 if settings.temperature is None else settings.temperature,
        top_k=settings.top_k or 0,
        top_p=1.0 if settings.top_p is None else settings.top_p,
    )
