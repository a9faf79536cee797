"""A checkpoint as a model of lm-evaluation-harness: log-likelihoods of choices, and generation.

Only `eval.commands.harness` imports this file, after checking that the package is installed.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
    resolve_max_length,
)
from torch import Tensor
from tqdm import tqdm
from transformers import StoppingCriteria

from eval.answers.batches import pad_tokens
from eval.answers.likelihood import EncodedInputs, target_log_probs
from eval.answers.seq2seq import Seq2Seq
from moe.errors import ConfigError, DataError

NO_ROLLING = (
    "it asks for loglikelihood_rolling, the probability of a text without an input. An encoder-decoder then reads a "
    "lone end token, and what comes out compares neither with a causal model's perplexity nor with the loss on "
    "corrupted spans. Leave it out."
)
"""Why a task of rolling log-likelihoods is refused."""

_MAX_NEW_TOKENS = 256  # lm_eval's own default

Tokens = tuple[int, ...]


class TargetScore(NamedTuple):
    """Score of a continuation, as lm-evaluation-harness expects it.

    Attributes:
        log_prob: Sum over its tokens, in nats.
        is_greedy: Whether greedy decoding gives it.
    """

    log_prob: float
    is_greedy: bool


_NOT_SCORED = TargetScore(0.0, False)


class HarnessModel(TemplateLM):
    """Answers and truncates texts like `lm_eval --model hf` with `backend=seq2seq`.

    It corrects these faults: generation stops after the number of tokens that the task requests, to
    which theirs adds the input's length, and at the task's stop strings, which theirs applies only
    afterwards; a model fine-tuned with a token before every target gets this token.
    """

    backend = "seq2seq"

    def __init__(self, system: Seq2Seq, batch_size: int) -> None:
        """Stores a checkpoint and the number of contexts in a batch."""
        super().__init__()
        self.system = system
        self.batch_size = batch_size
        self.tokenizer = system.tokenizer

    @property
    def eot_token_id(self) -> int:
        """The end token."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Token used as an empty context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a context; longer contexts keep their end."""
        return resolve_max_length(self.system.model.config, self.tokenizer)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Returns the tokens of a text, with the end token unless `add_special_tokens` is False."""
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)

    @torch.inference_mode()
    def _loglikelihood_tokens(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Returns the score of each (texts, context, continuation)."""
        # All continuations of a context are scored with one pass of the encoder.
        scores: dict[Tokens, dict[Tokens, TargetScore]] = {}
        pairs: list[tuple[Tokens, Tokens]] = []
        for texts, context_tokens, continuation_tokens in requests:
            context = tuple(context_tokens[-self.max_length :])
            continuation = tuple(continuation_tokens)
            if not continuation:
                raise DataError(
                    f"A choice of a task is {texts[1]!r}, which has no tokens. Its context: {texts[0]!r}."
                )
            pairs.append((context, continuation))
            scores.setdefault(context, {})[continuation] = _NOT_SCORED

        contexts = list(scores)
        with _progress(len(contexts), "Contexts scored", disable_tqdm) as bar:
            for numbers in self._batches(contexts):
                self._score_batch({contexts[n]: scores[contexts[n]] for n in numbers})
                bar.update(len(numbers))
        return [scores[context][continuation] for context, continuation in pairs]

    def _score_batch(self, batch: dict[Tokens, dict[Tokens, TargetScore]]) -> None:
        """Sets the scores of the continuations of some contexts."""
        model = self.system.model
        input_ids, mask = pad_tokens(list(batch), self.system.pad, model.device)
        encoder_output = model.get_encoder()(input_ids=input_ids, attention_mask=mask)
        encoded = EncodedInputs(encoder_output, mask)

        first, *forced = self.system.start
        # A target begins with the first token of the model's fine-tuning targets, if any.
        targets: list[list[list[int]]] = []
        for continuations in batch.values():
            targets.append([[*forced, *continuation] for continuation in continuations])
        scored = target_log_probs(model, encoded, first, targets)

        for row, continuations in enumerate(batch.values()):
            for column, continuation in enumerate(continuations):
                continuations[continuation] = TargetScore(
                    log_prob=sum(scored.log_probs[row][column]),
                    is_greedy=scored.is_greedy[row][column],
                )

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Raises: an encoder-decoder cannot score a text without an input.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"A task cannot be run: {NO_ROLLING}")

    @torch.inference_mode()
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns a text for each request of (context, settings)."""
        # Only requests with the same settings can be generated together.
        by_settings: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            settings = json.dumps(request.args[1], sort_keys=True)
            by_settings.setdefault(settings, []).append(number)

        answers = [""] * len(requests)
        with _progress(len(requests), "Texts generated", disable_tqdm) as bar:
            for settings, members in by_settings.items():
                texts = [requests[number].args[0] for number in members]
                contexts: list[list[int]] = []
                for tokens in self.tokenizer(texts)["input_ids"]:
                    contexts.append(tokens[-self.max_length :])

                for batch in self._batches(contexts):
                    batch_contexts = [contexts[position] for position in batch]
                    generated = self._generate(batch_contexts, json.loads(settings))
                    for position, text in zip(batch, generated, strict=True):
                        answers[members[position]] = text
                    bar.update(len(batch))
        return answers

    def _generate(self, contexts: Sequence[Sequence[int]], settings: dict[str, Any]) -> list[str]:
        """Returns a text for each context, truncated before the first stop string."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(settings, _MAX_NEW_TOKENS))
        eos_text = self.tokenizer.decode(self.eot_token_id)
        stop_strings = handle_stop_sequences(options.pop("until"), eos=eos_text)

        # transformers warns about an unused temperature.
        if not options["do_sample"]:
            options.pop("temperature", None)

        model = self.system.model
        input_ids, mask = pad_tokens(contexts, self.system.pad, model.device)

        # The model's initial token from fine-tuning is not part of the text.
        num_forced = len(self.system.start) - 1
        tokens = model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            max_new_tokens=options.pop("max_gen_toks") + num_forced,
            pad_token_id=self.system.pad,
            stopping_criteria=[_StopStrings(self.tokenizer, stop_strings)],
            **options,
        )
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [postprocess_generated_text(text, stop_strings, None) for text in texts]

    def _batches(self, contexts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yields the indices of all contexts in batches, the longest first.

        Running out of memory then shows at once.
        """
        longest_first = sorted(range(len(contexts)), key=lambda number: -len(contexts[number]))
        for start in range(0, len(longest_first), self.batch_size):
            yield longest_first[start : start + self.batch_size]


def _progress(total: int, description: str, disable: bool) -> tqdm:
    return tqdm(total=total, desc=description, mininterval=1.0, disable=disable)


class _StopStrings(StoppingCriteria):
    """Ends each sequence whose text holds a string after which it will be truncated anyway."""

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = [s for s in stop_strings if s and s != tokenizer.eos_token]

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns <bool>[N] which of the sequences <int64>[N, T] are done."""
        if not self._stop_strings:
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        texts = self._tokenizer.batch_decode(input_ids, skip_special_tokens=True)
        is_done: list[bool] = []
        for text in texts:
            is_done.append(any(stop in text for stop in self._stop_strings))
        return torch.tensor(is_done, device=input_ids.device)
