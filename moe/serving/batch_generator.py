"""Answers a stream of texts in order, many at a time; engine.py computes the tokens."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from moe.checks import check, check_integer, shown
from moe.data.tokenizer import prompt_ids, text_ids
from moe.errors import DataError
from moe.serving.engine import Answer, Engine, Piece
from moe.serving.languages import Languages
from moe.serving.sampling import Sampling, sampling_of

_AHEAD = 32
"""Most requests that were read and not yet returned, as a multiple of the batch."""

_BEAM_ROUND = 16
"""Requests of a beam search that are sorted by length together, as a multiple of the batch."""

_MOST_CHARACTERS = 64
"""Most characters of a text for each token that it may have; to count tokens takes seconds a megabyte."""


@dataclass(frozen=True)
class Request:
    """A text with its own settings.

    Attributes:
        text: Input of the encoder.
        sampling: Settings of the answer; None for those of the generator.
    """

    text: str
    sampling: Sampling | None = None


Item = str | Request | DataError


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
        languages: Languages | None = None,
        on_piece: Callable[[Piece], None] | None = None,
        group: ProcessGroup | None = None,
        **sampling: Any,
    ) -> None:
        """Prepares a model, which must not drop tokens.

        Args:
            model: An encoder-decoder of transformers, dense or sparse.
            tokenizer: Its tokenizer.
            max_batch: Most requests that run at a time.
            max_input: Most tokens of a text. A longer one is refused, alone.
            languages: Those of a model of names, which refuses other texts.
            on_piece: Called with each token of every answer as soon as it is known.
            group: Ranks that share the model's experts. All of them call `map` at the same time, with
                their own texts, and read it to the end.
            sampling: Fields of `Sampling`, for requests without their own. The defaults are those of
                `model.generation_config` for temperature, top_k and top_p, if it samples.

        Raises:
            ConfigError: When the model or a setting is not supported.
        """
        check_integer("max_input", max_input, least=1)
        self.engine = Engine(model, tokenizer, max_batch=max_batch, group=group)
        self.tokenizer = tokenizer
        self.max_input = max_input
        self.languages = languages
        self.sampling = replace(default_sampling(model), **sampling)
        self.on_piece = on_piece
        for stop in self.sampling.stop:
            written = tokenizer.decode(text_ids(tokenizer, [stop])[0], skip_special_tokens=True)
            is_possible = set(stop) <= {*written, " "}
            check(is_possible, "stop", stop, "a text of characters that the vocabulary writes")

    def __call__(self, texts: Iterable[str]) -> list[str]:
        """Returns the answers to texts.

        Raises:
            DataError: When a text cannot be answered.
        """
        answers = []
        for answer in self.map(texts):
            if answer.error is not None:
                raise DataError(answer.error)
            answers.append(answer.text)
        return answers

    def map(self, texts: Iterable[Item]) -> Iterator[Answer]:
        """Yields the answer to each text, in order.

        Texts are read as they are needed, so an endless iterator works. An answer depends only on
        its text and its settings; those that share settings draw with the seed and their number,
        counted from 0.

        Args:
            texts: Texts, or requests with their own settings. A DataError in their place becomes a
                refusal with its message.
        """
        yield from self.map_numbered(enumerate(texts))

    def map_numbered(self, numbered: Iterable[tuple[int, Item]]) -> Iterator[Answer]:
        """Yields answers likewise, to texts with numbers of their own."""
        engine = self.engine
        source = iter(numbered)
        order: deque[int] = deque()  # numbers that were read and not answered
        answers: dict[int, Answer] = {}
        exhausted = False
        while engine.anywhere(bool(order) or not exhausted):
            # Enough texts to group them by length, but not without limit.
            room = min(_AHEAD * engine.max_batch - len(order), 4 * engine.max_batch)
            if not exhausted and len(engine.waiting) < 2 * engine.max_batch and room > 0:
                chunk = list(islice(source, room))
                exhausted = len(chunk) < room
                order.extend(number for number, _ in chunk)
                for refusal in self.submit(chunk):
                    answers[refusal.number] = refusal

            for piece in engine.step():
                if self.on_piece is not None:
                    self.on_piece(piece)
                if piece.answer is not None:
                    answers[piece.number] = piece.answer

            while order and order[0] in answers:
                yield answers.pop(order.popleft())

    def submit(self, requests: Iterable[tuple[int, Item]]) -> list[Answer]:
        """Queues numbered requests, and returns refusals of those that cannot be answered."""
        numbered = list(requests)
        items = [item for _, item in numbered]
        all_tokens = encode_items(self.tokenizer, items, self.max_input, self.languages)
        refused = []
        for (number, item), tokens in zip(numbered, all_tokens, strict=True):
            if isinstance(tokens, DataError):
                refused.append(Answer(number, error=str(tokens)))
                continue
            own = item.sampling if isinstance(item, Request) else None
            sampling = own or sampling_of(self.sampling, number)
            self.engine.submit(number, tokens, sampling, stream=self.on_piece is not None)
        return refused


def search_beams(
    model: Any,
    tokenizer: Any,
    numbered: Iterable[tuple[int, Item]],
    *,
    num_beams: int,
    max_new_tokens: int,
    max_batch: int = 32,
    max_input: int = 512,
    languages: Languages | None = None,
) -> Iterator[Answer]:
    """Yields the answer of the model's own beam search to each numbered request, in order.

    Args:
        model: An encoder-decoder of transformers, dense or sparse.
        tokenizer: Its tokenizer.
        numbered: Requests without sampling, and their numbers.
        num_beams: Beams of a request.
        max_new_tokens: Most tokens of an answer.
        max_batch: Requests of a batch, which have similar lengths.
        max_input: Most tokens of a text. A longer one is refused, alone.
        languages: Those of a model of names, which refuses other texts.
    """
    source = iter(numbered)
    while chunk := list(islice(source, _BEAM_ROUND * max_batch)):
        answers: dict[int, Answer] = {}
        inputs: list[tuple[int, list[int]]] = []
        items = [item for _, item in chunk]
        all_tokens = encode_items(tokenizer, items, max_input, languages)
        for (number, item), tokens in zip(chunk, all_tokens, strict=True):
            if isinstance(tokens, DataError):
                answers[number] = Answer(number, error=str(tokens))
            elif isinstance(item, Request) and item.sampling is not None:
                answers[number] = Answer(
                    number, error="sampling cannot be combined with num_beams."
                )
            else:
                inputs.append((number, tokens))

        # Inputs of similar length share a batch.
        inputs.sort(key=lambda pair: len(pair[1]))
        for start in range(0, len(inputs), max_batch):
            batch = inputs[start : start + max_batch]
            rows = {"input_ids": [tokens for _, tokens in batch]}
            encoded = tokenizer.pad(rows, return_tensors="pt").to(model.device)
            options = {"max_new_tokens": max_new_tokens, "num_beams": num_beams}
            generated = model.generate(**encoded, **options)
            decoded = tokenizer.batch_decode(generated, skip_special_tokens=True)
            for (number, _), text in zip(batch, decoded, strict=True):
                answers[number] = Answer(number, text)
        for number, _ in chunk:
            yield answers[number]


def encode_items(
    tokenizer: Any, items: Sequence[Item], max_input: int, languages: Languages | None = None
) -> list[list[int] | DataError]:
    """Returns the tokens of each request, or the error that refuses it.

    Args:
        tokenizer: Tokenizer of the model.
        items: The requests.
        max_input: Most tokens of a text.
        languages: Those of a model of names.
    """
    texts = [_text_of(item, max_input, languages) for item in items]
    valid = [text for text in texts if isinstance(text, str)]
    encoded = iter(prompt_ids(tokenizer, valid))

    results: list[list[int] | DataError] = []
    for text in texts:
        tokens = text if isinstance(text, DataError) else next(encoded)
        if not isinstance(tokens, DataError):
            if languages is not None and len(tokens) > (languages.longest or max_input):
                tokens = languages.too_long(len(tokens))
            elif len(tokens) > max_input:
                tokens = _too_long(f"{len(tokens)} tokens", f"max_input, {max_input}")
        results.append(tokens)
    return results


def _text_of(item: Item, max_input: int, languages: Languages | None) -> str | DataError:
    """Returns the text of a request, or the error that refuses it before it is tokenized."""
    if isinstance(item, DataError):
        return item
    text = item.text if isinstance(item, Request) else item
    if not isinstance(text, str) or not text.strip():
        return DataError(f"The text is {shown(text)}; expected one that is not empty.")
    most = max_input * _MOST_CHARACTERS
    if len(text) > most:
        return _too_long(
            f"{len(text)} characters", f"{most}, {_MOST_CHARACTERS} for each token of max_input"
        )
    return text if languages is None else languages.read(text)


def _too_long(size: str, most: str) -> DataError:
    return DataError(
        f"The text has {size}; expected at most {most}. Shorten it, or set max_input higher."
    )


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
