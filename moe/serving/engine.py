"""Continuous batching: requests enter and leave a running batch at any step.

`submit` queues a request, `step` computes one token of every running request. The encoder runs over
waiting requests of similar lengths as soon as enough rows are free. slots.py holds the cache,
sampling.py chooses the tokens; batch_generator.py and server.py drive the engine.
"""

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from moe.checks import check, check_integer, shown
from moe.errors import ConfigError
from moe.serving.sampling import Sampling, choose_tokens, draws_of, likeliest_tokens
from moe.serving.slots import Slots
from moe.sparse.capacity import slots_of_expert
from moe.sparse.editing import sparse_layers

Finish = Literal["end", "stop", "length"]

_REFILL = 8
"""The encoder waits until one in this many rows is free: a few requests cost it as much as one."""

_UNSUPPORTED = {
    "num_beams": (None, 1),
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None, {}),
    "min_p": (None, 0.0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "guidance_scale": (None, 1, 1.0),
}
"""Settings of generation that change answers and are not supported, with the values that do nothing."""


class Piece(NamedTuple):
    """One token of an answer.

    Attributes:
        number: Number of the request.
        token: The token; -1 if the model failed.
        text: Text that became certain with it; empty unless the request streams.
        answer: The whole answer, with its last token.
        log_prob: Log-probability of the token under the model, if its request has scores.
        likeliest: Log-probabilities of the likeliest tokens in its place, as many as requested.
    """

    number: int
    token: int
    text: str
    answer: "Answer | None"
    log_prob: float = 0.0
    likeliest: Mapping[int, float] = {}


@dataclass(frozen=True)
class Answer:
    """A model's answer to one request.

    Attributes:
        number: Number of the request.
        text: The answer without special tokens; it ends before a stop string.
        tokens: Its tokens after the decoder's start, the end token included.
        log_probs: Log-probability of each token under the model; empty unless requested.
        finish: Whether an end token, a stop string or the maximum length ended it; None if the
            request has no answer.
        error: Why the request was refused, or how the model failed.
    """

    number: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    error: str | None = None


class _Request(NamedTuple):
    """A request that waits.

    Attributes:
        number: Its number.
        tokens: Encoder tokens.
        sampling: Settings of the answer.
        stream: Whether its pieces have texts.
        client: Requests of one client take turns with those of others.
        num_likeliest: Number of the likeliest tokens in each of its pieces.
    """

    number: int
    tokens: list[int]
    sampling: Sampling
    stream: bool = False
    client: int = 0
    num_likeliest: int = 0


class _Row:
    """A running request: its answer so far."""

    def __init__(self, request: _Request, tokenizer: Any) -> None:
        self.request = request
        self.number = request.number
        self.sampling = request.sampling
        self.draws = draws_of(request.sampling.seed)
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.text = ""
        self._tokenizer = tokenizer
        self._shown = 0  # characters that were returned by read_new

    def decode(self) -> bool:
        """Reads the text of all tokens; returns whether a stop string ended it."""
        self.text = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
        positions = [self.text.find(stop) for stop in self.sampling.stop]
        ends = [position for position in positions if position >= 0]
        if ends:
            self.text = self.text[: min(ends)]
        return bool(ends)

    def read_new(self, *, ended: bool) -> str:
        """Returns the text that is certain and was not returned before."""
        certain = self.text
        if not ended:
            # The last token may be a part of a character, and the last characters of a stop string.
            certain = certain.rstrip("\ufffd")
            longest = max(map(len, self.sampling.stop), default=1) - 1
            for size in range(min(longest, len(certain)), 0, -1):
                if any(stop.startswith(certain[-size:]) for stop in self.sampling.stop):
                    certain = certain[:-size]
                    break
        new = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        return new


class Engine:
    """Answers requests with an encoder-decoder, many at a time.

    An answer equals that of the request alone, token for token, apart from ties within the rounding
    of floating point numbers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        max_batch: int = 32,
        group: ProcessGroup | None = None,
    ) -> None:
        """Prepares a model.

        Args:
            model: An encoder-decoder of transformers, dense or sparse; set to evaluation.
            tokenizer: Its tokenizer, for the texts of answers.
            max_batch: Most requests that run at a time.
            group: Ranks that share the model's experts. Each has its own requests, and all call
                `step` together: a rank without requests takes part with padding.

        Raises:
            ConfigError: When the model is not an encoder-decoder, its experts may drop tokens, or its
                generation settings are not supported.
        """
        check_integer("max_batch", max_batch, least=1)
        refuse_unsupported(model)
        self.model: Any = model.eval()
        self.tokenizer = tokenizer
        self.max_batch = max_batch
        self.group = group
        self.waiting: list[_Request] = []
        self._clear()

        settings: Any = model.generation_config
        self._start = start_tokens(model)
        eos = settings.eos_token_id
        self._ends = set(eos if isinstance(eos, list) else [eos])
        self._forced_end = settings.forced_eos_token_id
        suppressed = [*(settings.suppress_tokens or []), *_bad_tokens(settings)]
        self._suppressed = torch.tensor(suppressed, device=model.device).long()
        self._pad = model.config.pad_token_id or 0
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "decoder_position_ids" in parameters
        # Losses and statistics of routers take a tenth of a step.
        takes_records = "output_router_logits" in parameters
        self._options: dict[str, Any] = {"use_cache": True, "return_dict": True}
        self._options |= {"output_router_logits": False} if takes_records else {}
        self._encoded: Any = None
        self._mixes_ages = max_batch > 1 and self._ignores_age()

    def submit(
        self,
        number: int,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        stream: bool = False,
        client: int | None = None,
        num_likeliest: int = 0,
    ) -> None:
        """Queues a request.

        Args:
            number: Identifies it.
            tokens: Encoder tokens, at least one.
            sampling: Settings of the answer.
            stream: Whether its pieces have texts.
            client: Number of the client, whose requests take turns with those of others; None for
                a client of its own.
            num_likeliest: Number of the likeliest tokens in each of its pieces, if it has scores.
        """
        assert tokens, "a request without tokens"
        client = number if client is None else client
        self.waiting.append(_Request(number, list(tokens), sampling, stream, client, num_likeliest))

    @torch.inference_mode()
    def cancel(self, number: int) -> None:
        """Removes a request from the queue or the running batch."""
        self.waiting = [request for request in self.waiting if request.number != number]
        self._leave([row for row, state in enumerate(self._rows) if state.number == number])

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self.waiting and not self._rows

    @torch.inference_mode()
    def step(self) -> list[Piece]:
        """Returns the next token of every running request; admits waiting ones before.

        After an error, `abort` removes the running requests.
        """
        pieces: list[Piece] = []
        chosen = self._choose()
        if self.anywhere(bool(chosen)):
            if chosen:
                num_running = len(self._rows)
                pieces += self._take(self._encode(chosen), num_running)
            else:
                self._prefill([[self._pad]], [0])
        if self.anywhere(bool(self._rows)):
            if self._rows:
                pieces += self._take(self._decode(), 0)
            else:
                self._decode_padding()
        return pieces

    def abort(self, error: Exception) -> list[Piece]:
        """Removes all running requests, and returns answers that say with which error they failed."""
        message = f"The model failed: {type(error).__name__}: {error}"
        numbers = [row.number for row in self._rows]
        self._clear()
        return [Piece(number, -1, "", Answer(number, error=message)) for number in numbers]

    def _clear(self) -> None:
        """Removes all rows."""
        device = self.model.device
        self._rows: list[_Row] = []
        self._slots = Slots(self.max_batch, device)
        # Inputs of the next step.  [N, 1]
        self._tokens = torch.zeros(0, 1, dtype=torch.long, device=device)
        # Prefix of each row's text, from 1, or 0.  [N, 1]
        self._prefixes = self._tokens

    def anywhere(self, here: bool) -> bool:
        """Returns whether something holds on any rank of the group; without one, here."""
        if self.group is None:
            return here
        flag = torch.tensor(int(here), device=self.model.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, self.group)
        return bool(flag)

    def _choose(self) -> list[_Request]:
        """Removes from the queue the requests that start now, and returns them."""
        free = self.max_batch - len(self._rows)
        enough = free >= max(1, self.max_batch // _REFILL) and self._mixes_ages
        if not self.waiting or (self._rows and not enough):
            return []

        chosen = self._in_turn()[:free]
        numbers = {request.number for request in chosen}
        self.waiting = [request for request in self.waiting if request.number not in numbers]
        return chosen

    def _in_turn(self) -> list[_Request]:
        """Returns the waiting requests in the order in which they start.

        Clients take turns, and a running request counts as a turn. The oldest of those whose turn
        it is comes first, so that none waits forever, and then those closest to it in length.
        """
        oldest_of: dict[int, _Request] = {}
        for request in self.waiting:
            oldest_of.setdefault(request.client, request)
        turns = Counter(row.request.client for row in self._rows)
        turn_of: dict[int, int] = {}
        for request in sorted(self.waiting, key=lambda each: _gap(each, oldest_of[each.client])):
            turn_of[request.number] = turns[request.client]
            turns[request.client] += 1
        oldest = min(self.waiting, key=lambda each: turn_of[each.number])
        return sorted(self.waiting, key=lambda each: (turn_of[each.number], _gap(each, oldest)))

    def _encode(self, requests: list[_Request]) -> Tensor:
        """Adds rows for requests, and returns the logits of their first tokens <float>[R, V]."""
        self._rows += [_Row(request, self.tokenizer) for request in requests]
        lengths = [len(request.tokens) for request in requests]
        cache, logits = self._prefill([request.tokens for request in requests], lengths)
        self._slots.add(cache, lengths)
        last = torch.full((len(requests), 1), self._start[-1], device=logits.device)
        self._tokens = torch.cat([self._tokens, last])
        prefixes = self._encoded.get("prefix_numbers", torch.zeros_like(last))
        self._prefixes = torch.cat([self._prefixes, prefixes.amax(dim=1, keepdim=True)])
        return logits

    def _prefill(
        self, inputs: list[list[int]], lengths: list[int]
    ) -> tuple[EncoderDecoderCache, Tensor]:
        """Runs the encoder, and the decoder over its start tokens.

        Args:
            inputs: R rows of encoder tokens.
            lengths: How many tokens of each row are real.

        Returns:
            A cache of R rows, and the logits of their first tokens <float>[R, V].
        """
        device = self.model.device
        rows = [torch.tensor(row) for row in inputs]
        input_ids = pad_sequence(rows, batch_first=True, padding_value=self._pad)  # [R, L]
        mask = torch.arange(input_ids.shape[1]) < torch.tensor(lengths)[:, None]
        mask = mask.long().to(device)

        self._encoded = self.model.get_encoder()(
            input_ids=input_ids.to(device), attention_mask=mask, return_dict=True
        )
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        output = self.model(
            encoder_outputs=self._encoded,
            attention_mask=mask,
            decoder_input_ids=torch.tensor([self._start] * len(inputs), device=device),
            past_key_values=cache,
            **self._options,
        )
        return cache, output.logits[:, -1]

    def _decode(self) -> Tensor:
        """Returns the logits of the next token of all rows <float>[N, V]."""
        slots = self._slots
        options = dict(self._options)
        if self._takes_positions:
            options["decoder_position_ids"] = slots.positions()
        output = self.model(
            encoder_outputs=self._cached_memory(len(self._rows), slots.memory_length),
            attention_mask=slots.cross_mask(),
            decoder_input_ids=self._tokens,
            decoder_attention_mask=slots.self_mask(),
            past_key_values=slots.cache,
            **options,
        )
        slots.advance()
        return output.logits[:, -1]

    def _decode_padding(self) -> None:
        """Takes part in a step of other ranks with one row of padding."""
        padding = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
        self.model(
            encoder_outputs=self._cached_memory(1, 1),
            attention_mask=padding,
            decoder_input_ids=padding + self._pad,
            decoder_attention_mask=padding,
            past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()),
            **self._options,
        )

    def _cached_memory(self, num_rows: int, length: int) -> Any:
        """Returns an encoder output of which models read only the shape, since its keys are cached."""
        memory = self._encoded.last_hidden_state[:1, :1].expand(num_rows, length, -1)  # [N, M, D]
        cached = type(self._encoded)(last_hidden_state=memory)
        cached.prefix_numbers = self._prefixes if self._rows else memory.new_zeros(1, 1).long()
        return cached

    def _take(self, logits: Tensor, first: int) -> list[Piece]:
        """Adds a token to each row from `first` on, and ends the answers that are complete."""
        rows = self._rows[first:]
        allowed = logits
        if self._suppressed.numel():
            allowed = logits.index_fill(1, self._suppressed, -torch.inf)
        chosen = choose_tokens(
            allowed, [row.sampling for row in rows], [row.draws for row in rows]
        )  # [N]
        if self._forced_end is not None:
            last = [len(row.tokens) + 1 == row.sampling.max_new_tokens for row in rows]
            chosen = chosen.masked_fill(torch.tensor(last, device=chosen.device), self._forced_end)
        self._tokens[first:, 0] = chosen
        tokens = chosen.tolist()

        log_probs = [0.0] * len(rows)
        likeliest: list[dict[int, float]] = [{}] * len(rows)
        if any(row.sampling.scores for row in rows):
            wide = logits.float().log_softmax(dim=-1)  # [N, V]
            log_probs = wide.gather(1, chosen[:, None])[:, 0].tolist()
            likeliest = likeliest_tokens(wide, [row.request.num_likeliest for row in rows])

        pieces, ended = [], []
        for index, (row, token, log_prob) in enumerate(zip(rows, tokens, log_probs, strict=True)):
            row.tokens.append(token)
            if row.sampling.scores:
                row.log_probs.append(log_prob)
            finish = self._finish(row, token)
            answer = None
            if finish is not None:
                ended.append(first + index)
                answer = Answer(row.number, row.text, row.tokens, row.log_probs, finish)
            text = row.read_new(ended=finish is not None) if row.request.stream else ""
            pieces.append(Piece(row.number, token, text, answer, log_prob, likeliest[index]))
        self._leave(ended)
        return pieces

    def _finish(self, row: _Row, token: int) -> Finish | None:
        """Returns why an answer is complete with this token; None if it is not."""
        finish: Finish | None = None
        if token in self._ends:
            finish = "end"
        elif len(row.tokens) == row.sampling.max_new_tokens:
            finish = "length"
        if (finish or row.sampling.stop or row.request.stream) and row.decode():
            finish = "stop"
        return finish

    def _leave(self, rows: list[int]) -> None:
        """Ends rows, given in ascending order."""
        if not rows:
            return
        # In the order in which the slots fill gaps.
        order = list(range(len(self._rows)))
        for row in reversed(rows):
            last = order.pop()
            if row < len(order):
                order[row] = last
        self._rows = [self._rows[row] for row in order]
        self._tokens = self._tokens[order]
        self._prefixes = self._prefixes[order]
        self._slots.remove(rows[::-1])

    @torch.inference_mode()
    def _ignores_age(self) -> bool:
        """Returns whether a row that begins late has the logits of one that begins first.

        They differ in models that count the decoder's positions from the first column, such as BART.
        """
        end = next(iter(self._ends))
        request = _Request(0, [end, end], Sampling())
        rows = []
        for _ in range(2):
            self._encode([request])
            self._tokens[-1:] = end
            rows.append(self._decode()[-1].float())
            self._decode()
        self._leave([0, 1])
        spread = rows[0].std()
        rounding = 1e-3 if self.model.dtype == torch.float32 else 0.1
        return bool((rows[0] - rows[1]).abs().max() <= rounding * spread)


def _gap(request: _Request, other: _Request) -> int:
    return abs(len(request.tokens) - len(other.tokens))


def start_tokens(model: PreTrainedModel) -> list[int]:
    """Returns the tokens that every answer begins with, which are not part of it."""
    settings: Any = model.generation_config
    candidates = [
        settings.decoder_start_token_id,
        getattr(model.config, "decoder_start_token_id", None),
        settings.bos_token_id,
    ]
    start = next((token for token in candidates if token is not None), None)
    if start is None:
        raise ConfigError(
            "The model has no decoder_start_token_id. Set it in model.generation_config."
        )
    forced = settings.forced_bos_token_id
    return [start] if forced is None else [start, forced]


def _bad_tokens(settings: Any) -> list[int]:
    """Returns the tokens that are never generated, such as Marian's padding.

    Raises:
        ConfigError: When a word of `bad_words_ids` has several tokens.
    """
    words = settings.bad_words_ids or []
    is_token = all(len(word) == 1 for word in words)
    check(is_token, "generation_config.bad_words_ids", words, "words of one token")
    return [word[0] for word in words]


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raises unless a model's answers can be computed in a batch that changes.

    Raises:
        ConfigError: When it is not an encoder-decoder, has no end token, has generation settings that
            are not supported, or its experts have a capacity, so that answers would depend on the
            batch.
    """
    settings: Any = getattr(model, "generation_config", None)
    if settings is None or not model.config.is_encoder_decoder:
        raise ConfigError(
            f"{type(model).__name__} is not an encoder-decoder that generates; expected a model such as "
            "AutoModelForSeq2SeqLM.from_pretrained returns."
        )
    if settings.eos_token_id is None:
        raise ConfigError("The model has no eos_token_id. Set it in model.generation_config.")
    for name, harmless in _UNSUPPORTED.items():
        value = getattr(settings, name, None)
        if value not in harmless:
            raise ConfigError(
                f"generation_config.{name} is {shown(value)}, which is not supported here. Set it to "
                f"{harmless[-1]}, or call model.generate()."
            )
    for layer in sparse_layers(model).values():
        if slots_of_expert(layer.config, 1 << 20, training=False) is not None:
            raise ConfigError(
                "The experts have a capacity, so an answer would depend on the other requests. Load the model "
                "without one: load_model(folder, dropless=True), or "
                "from_pretrained(folder, eval_capacity_factor=None)."
            )
