"""OpenAI's completions API: a request's JSON as settings, and answers as JSON.

Source: "Create completion" in OpenAI's API reference. Differs: prompts are inputs of the encoder;
`temperature` and `max_tokens` default to the server's; `top_k` and `return_token_ids` are vLLM's, and
so are up to 20 `logprobs`.
"""

import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe.checks import check, check_field_types, check_integer, is_kind
from moe.data.tokenizer import piece_texts
from moe.errors import ConfigError, did_you_mean
from moe.serving.engine import Piece
from moe.serving.sampling import Sampling

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
}
"""Fields that are not supported, with the values that do nothing."""

_FIELDS = (
    *("prompt", "model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n"),
    *("stream", "stream_options", "logprobs", "return_token_ids", "user"),
    *_NEUTRAL,
)

_ECHO = "The encoder reads prompts without scoring them: use lm_eval --model hf, backend=seq2seq."
_MOST_STOPS = 4
_MOST_LOGPROBS = 20
_MOST_CHOICES = 128

Prompt = str | list[int]
"""A text, or its tokens."""


@dataclass(frozen=True)
class Completion:
    """A client's request.

    Attributes:
        model: Name of the model; None for any.
        prompts: Inputs of the encoder.
        num_choices: Answers to each prompt.
        sampling: Settings of all answers.
        num_likeliest: Number of the likeliest tokens whose log-probabilities are returned, too.
        stream: Whether the client reads the answers as they are generated.
        include_usage: Whether a stream ends with the numbers of tokens.
        return_token_ids: Whether answers have the ids of their tokens.
    """

    model: str | None
    prompts: list[Prompt]
    num_choices: int
    sampling: Sampling
    num_likeliest: int
    stream: bool
    include_usage: bool
    return_token_ids: bool


def parse_completion(body: Mapping[str, Any], defaults: Sampling, max_answers: int) -> Completion:
    """Returns the request in a JSON object. The tokens of its prompts are not checked.

    Args:
        body: Its JSON.
        defaults: Settings that it does not have; `max_new_tokens` is also the most that it may
            ask for.
        max_answers: Most answers to all its prompts.

    Raises:
        ConfigError: When a field is missing, unknown, not supported or out of range.
    """
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        if name not in _FIELDS:
            raise ConfigError(f"{name[:80]} is not supported.{did_you_mean(name, _FIELDS)}")
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            advice = _ECHO if name == "echo" else "Leave it out."
            raise ConfigError(f"{name} is not supported. {advice}")

    num_choices = fields.get("n", 1)
    check_integer("n", num_choices, least=1, most=_MOST_CHOICES, reason="each is an answer")
    stream_options = fields.get("stream_options", {})
    check(isinstance(stream_options, dict), "stream_options", stream_options, "an object")
    completion = Completion(
        model=fields.get("model"),
        prompts=_prompts(fields.get("prompt"), num_choices, max_answers),
        num_choices=num_choices,
        sampling=_sampling(fields, defaults),
        num_likeliest=int(fields.get("logprobs", 0)),
        stream=fields.get("stream", False),
        include_usage=stream_options.get("include_usage", False),
        return_token_ids=fields.get("return_token_ids", False),
    )
    check_field_types(completion)
    return completion


def _prompts(prompt: object, num_choices: int, max_answers: int) -> list[Prompt]:
    """Returns the prompts in one of the four forms: a text or its tokens, or a list of either."""
    prompts: list[Any] = [prompt]
    if isinstance(prompt, list) and prompt and not is_kind(prompt[0], int):
        prompts = prompt
    if len(prompts) * num_choices > max_answers:
        raise ConfigError(
            f"prompt and n make {len(prompts) * num_choices} answers; expected at most {max_answers}."
        )
    holds = all(item and isinstance(item, str | list) for item in prompts)
    check(holds, "prompt", prompt, "a text, a list of tokens, or a list of either")
    return prompts


def _sampling(fields: Mapping[str, Any], defaults: Sampling) -> Sampling:
    """Returns the settings of the answers, checked by their names in the API."""
    most = defaults.max_new_tokens
    max_tokens = fields.get("max_tokens", most)
    check_integer("max_tokens", max_tokens, least=1, most=most, reason="the server's limit")
    logprobs = fields.get("logprobs", False)
    if logprobs is not False:
        check_integer("logprobs", logprobs, least=0, most=_MOST_LOGPROBS, reason="false for none")
    top_k = fields.get("top_k", defaults.top_k)
    stop = fields.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    holds = isinstance(stop, list) and len(stop) <= _MOST_STOPS
    check(holds, "stop", stop, f"a text, or up to {_MOST_STOPS} of them")
    return replace(
        defaults,
        max_new_tokens=max_tokens,
        temperature=fields.get("temperature", defaults.temperature),
        top_p=fields.get("top_p", defaults.top_p),
        top_k=0 if top_k == -1 else top_k,
        seed=fields.get("seed", secrets.randbits(63)),
        stop=tuple(stop),
        scores=logprobs is not False,
    )


class Envelope:
    """Makes the responses to one request, and holds the fields that they share."""

    def __init__(
        self, completion: Completion, model: str, tokenizer: Any, num_prompt_tokens: int
    ) -> None:
        self._completion = completion
        self._tokenizer = tokenizer
        self._num_prompt_tokens = num_prompt_tokens
        self._shared = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Returns one answer, or a part of it.

        Args:
            index: Number of the answer.
            pieces: Its tokens, at least one; of a stream, a single one.
        """
        tokens = [piece.token for piece in pieces]
        answer = pieces[-1].answer
        text = pieces[0].text if answer is None or self._completion.stream else answer.text
        finish = answer and ("length" if answer.finish == "length" else "stop")
        log_probs = self._log_probs(tokens, pieces) if self._completion.sampling.scores else None
        choice = {"index": index, "text": text, "logprobs": log_probs, "finish_reason": finish}
        return choice | ({"token_ids": tokens} if self._completion.return_token_ids else {})

    def _log_probs(self, tokens: list[int], pieces: Sequence[Piece]) -> dict[str, Any]:
        top = []
        for piece in pieces:
            log_probs = {**piece.likeliest, piece.token: piece.log_prob}
            texts = piece_texts(self._tokenizer, list(log_probs))
            top.append(dict(zip(texts, log_probs.values(), strict=True)))
        return {
            "tokens": piece_texts(self._tokenizer, tokens),
            "token_logprobs": [piece.log_prob for piece in pieces],
            "top_logprobs": top if self._completion.num_likeliest else None,
            "text_offset": None,
        }

    def wrap(self, choices: list[dict[str, Any]], num_tokens: int | None = None) -> dict[str, Any]:
        """Returns a response; with the number of generated tokens it has the usage."""
        usage = None
        if num_tokens is not None:
            usage = {
                "prompt_tokens": self._num_prompt_tokens,
                "completion_tokens": num_tokens,
                "total_tokens": self._num_prompt_tokens + num_tokens,
            }
        return {**self._shared, "choices": choices, "usage": usage}
