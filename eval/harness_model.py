"""A checkpoint as lm-evaluation-harness asks it: log-likelihoods by one encoder pass for each
context, generation.

Only `eval.commands.harness` imports this file, once it knows that the package is there.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

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

from eval.answers.likelihood import Memory, target_log_probs
from eval.answers.predict import Seq2Seq
from eval.commands.harness import ROLLING
from moe import ConfigError, DataError

T = TypeVar("T")
Tokens = tuple[int, ...]
_MAX_NEW_TOKENS = 256  # lm_eval's own, for a task that says nothing


class HarnessModel(TemplateLM):
    """Answers what `lm_eval --model hf` does with `backend=seq2seq`, and splits and cuts texts as
    that does.

    It differs where that one is at fault: a generation ends after as many tokens as the task asks
    for, where that one adds the length of the input, and at the task's stop strings, which that one
    finds only afterwards; a model that was fine-tuned with a token before every target is given it.
    """

    backend = "seq2seq"

    def __init__(self, system: Seq2Seq, batch_size: int) -> None:
        """Keeps a checkpoint, and how many contexts go through it at once."""
        super().__init__()
        self.system, self.batch_size = system, batch_size
        self.tokenizer = system.tokenizer

    @property
    def eot_token_id(self) -> int:
        """The end token."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands for an empty context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def max_length(self) -> int:
        """Most tokens of a context; of a longer one the end is kept."""
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
        """Returns for each (texts, context, continuation) the log-probability, and whether greedy
        decoding says so.
        """
        pairs = [
            (tuple(context[-self.max_length :]), tuple(continuation))
            for _, context, continuation in requests
        ]
        known: dict[Tokens, dict[Tokens, tuple[float, bool]]] = {}
        for (context, continuation), (texts, *_) in zip(pairs, requests, strict=True):
            if not continuation:
                raise DataError(
                    f"A choice of a task is {texts[1]!r}, which is no token. Its context: {texts[0]!r}."
                )
            known.setdefault(context, {})[continuation] = (0.0, False)
        model, (first, *forced) = self.system.model, self.system.start
        with tqdm(
            total=len(known), desc="Contexts scored", mininterval=1.0, disable=disable_tqdm
        ) as bar:
            for batch in self._batches(known):
                inputs = self._padded(batch)
                memory = Memory(model.get_encoder()(**inputs), inputs["attention_mask"])
                targets = [[[*forced, *target] for target in known[context]] for context in batch]
                log_probs, greedy, _ = target_log_probs(model, memory, first, targets)
                for context, sums, flags in zip(batch, log_probs, greedy, strict=True):
                    found = zip(map(sum, sums), flags, strict=True)
                    known[context] = dict(zip(known[context], found, strict=True))
                bar.update(len(batch))
        return [known[context][continuation] for context, continuation in pairs]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Refuses.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"A task cannot be run: {ROLLING}")

    @torch.inference_mode()
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns a text for each request of (context, settings)."""
        answers = [""] * len(requests)
        by_settings: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_settings.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        with tqdm(
            total=len(requests), desc="Texts generated", mininterval=1.0, disable=disable_tqdm
        ) as bar:
            for settings, numbers in by_settings.items():
                texts = self.tokenizer([requests[number].args[0] for number in numbers])[
                    "input_ids"
                ]
                contexts = {
                    number: text[-self.max_length :]
                    for number, text in zip(numbers, texts, strict=True)
                }
                for batch in self._batches(contexts, key=contexts.__getitem__):
                    made = self._generate(
                        [contexts[number] for number in batch], json.loads(settings)
                    )
                    for number, text in zip(batch, made, strict=True):
                        answers[number] = text
                    bar.update(len(batch))
        return answers

    def _generate(self, contexts: Sequence[Sequence[int]], settings: dict[str, Any]) -> list[str]:
        """Returns a text for each context, cut before the first stop string."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(settings, _MAX_NEW_TOKENS))
        stops = handle_stop_sequences(
            options.pop("until"), eos=self.tokenizer.decode(self.eot_token_id)
        )
        if not options["do_sample"]:
            options.pop("temperature", None)
        inputs = self._padded(contexts)
        tokens = self.system.model.generate(
            **inputs,
            max_new_tokens=options.pop("max_gen_toks") + len(self.system.start) - 1,
            pad_token_id=self.system.pad,
            stopping_criteria=[_StopStrings(self.tokenizer, stops)],
            **options,
        )
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [postprocess_generated_text(text, stops, None) for text in texts]

    def _batches(
        self, items: Iterable[T], key: Callable[[T], Any] = lambda item: item
    ) -> Iterator[list[T]]:
        """Gives all items, those with the longest keys first, so that what does not fit into memory
        shows at once.
        """
        ordered = sorted(items, key=lambda item: -len(key(item)))
        for start in range(0, len(ordered), self.batch_size):
            yield ordered[start : start + self.batch_size]

    def _padded(self, contexts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Returns `input_ids` and `attention_mask` <int64>[N, L] of contexts."""
        longest, device = max(map(len, contexts)), self.system.model.device
        rows = [[*context, *[self.system.pad] * (longest - len(context))] for context in contexts]
        lengths = torch.tensor([len(context) for context in contexts], device=device)
        mask = (torch.arange(longest, device=device) < lengths[:, None]).long()
        return {"input_ids": torch.tensor(rows, device=device), "attention_mask": mask}


class _StopStrings(StoppingCriteria):
    """Ends each sequence whose text holds a string after which it will be cut anyway."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop and stop != tokenizer.eos_token]

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns <bool>[N] which of the tokens <int64>[N, T] are done."""
        if not self._stops:
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        texts = self._tokenizer.batch_decode(input_ids, skip_special_tokens=True)
        done = [any(stop in text for stop in self._stops) for text in texts]
        return torch.tensor(done, device=input_ids.device)
