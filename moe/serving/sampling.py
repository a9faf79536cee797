"""How the next token of a request is chosen: greedily, or drawn with the request's own seed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from moe.checks import check, check_flag, check_integer, check_number

MAX_SEED = (1 << 64) - 1
_MOST_TOKENS = (1 << 31) - 1


@dataclass(frozen=True)
class Sampling:
    """Settings of one request.

    Attributes:
        max_new_tokens: Most tokens of an answer, the end token included.
        temperature: 0 takes the likeliest token; larger values draw less likely ones more often.
        top_k: Only this many of the likeliest tokens are drawn; 0 for all.
        top_p: Only the likeliest tokens whose probabilities sum to this are drawn; 1 for all.
        seed: Seed of the draws.
        stop: Texts that end an answer, which ends before them.
        scores: Whether to return the log-probability of each token.

    Raises:
        ConfigError: When a value is out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    scores: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("top_k", 0)):
            value = getattr(self, name)
            check_integer(name, value, least=least, most=_MOST_TOKENS, reason="no text is longer")
        check_number("temperature", self.temperature, least=0)
        check_number("top_p", self.top_p, above=0, most=1)
        check_integer("seed", self.seed, least=0, most=MAX_SEED, reason="it has 64 bits")
        stops = isinstance(self.stop, tuple) and all(
            isinstance(text, str) and text for text in self.stop
        )
        check(stops, "stop", self.stop, "a tuple of texts that are not empty")
        check_flag("scores", self.scores)


def draws_of(seed: int) -> np.random.Generator:
    """Returns the random numbers of one request: the same for any batch and order of arrival."""
    return np.random.Generator(np.random.Philox(key=seed))


def sampling_of(sampling: Sampling, number: int) -> Sampling:
    """Returns settings with a seed of their own for one of the requests that share `sampling`."""
    if sampling.temperature == 0:
        return sampling
    seed = np.random.SeedSequence([sampling.seed, number]).generate_state(1, np.uint64)[0]
    return replace(sampling, seed=int(seed))


def choose_tokens(
    logits: Tensor, settings: Sequence[Sampling], draws: Sequence[np.random.Generator]
) -> Tensor:
    """Returns the next token of each request.

    Args:
        logits: <float>[N, V].
        settings: N settings.
        draws: N sources of random numbers, used by the requests that are not greedy.

    Returns:
        <int64>[N]
    """
    tokens = logits.argmax(dim=-1)
    sampled = [row for row, sampling in enumerate(settings) if sampling.temperature > 0]
    if sampled:
        rows = torch.tensor(sampled, device=logits.device)
        chosen = [settings[row] for row in sampled]
        uniform = torch.tensor([draws[row].random() for row in sampled], device=logits.device)
        tokens[rows] = sample(logits[rows], chosen, uniform)
    return tokens


def likeliest_tokens(log_probs: Tensor, numbers: Sequence[int]) -> list[dict[int, float]]:
    """Returns the log-probabilities of the likeliest tokens of each request, likeliest first.

    Args:
        log_probs: <float32>[N, V].
        numbers: How many tokens each of the N requests wants.
    """
    values, tokens = log_probs.topk(min(max(numbers), log_probs.shape[1]))
    rows = zip(tokens.tolist(), values.tolist(), numbers, strict=True)
    return [dict(zip(ids[:number], row[:number], strict=True)) for ids, row, number in rows]


def sample(logits: Tensor, settings: Sequence[Sampling], uniform: Tensor) -> Tensor:
    """Returns a token of each row, drawn from the distribution that its settings leave.

    Args:
        logits: <float>[N, V].
        settings: N settings with a temperature above 0.
        uniform: <float>[N] random numbers in [0, 1).

    Returns:
        <int64>[N]
    """
    probs, tokens = kept_probs(logits, settings)

    # The first token at which the cumulative probability exceeds the random number.
    cumulative = probs.cumsum(dim=-1)
    threshold = uniform.to(cumulative)[:, None] * cumulative[:, -1:]
    index = (cumulative <= threshold).sum(dim=-1, keepdim=True)
    index = index.clamp(max=probs.shape[-1] - 1)
    return tokens.gather(1, index)[:, 0]


def kept_probs(logits: Tensor, settings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
    """Returns the probabilities that temperature, top_k and top_p leave, likeliest token first.

    Returns:
        Probabilities <float64>[N, V], 0 where a token cannot be drawn, and the tokens <int64>[N, V].

    Source:
        transformers 5.23.0 `generation/logits_process.py`, the warpers of temperature, top k and
        top p in this order. Differs: tokens of equal logits at the edge of top_k are not all kept.
    """

    def column(name: str) -> Tensor:
        values = [float(getattr(sampling, name)) for sampling in settings]
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    # Below the largest logit, so that a temperature near 0 gives it the probability 1.
    sorted_logits, tokens = logits.double().sort(dim=-1, descending=True, stable=True)
    scaled = (sorted_logits - sorted_logits[:, :1]) / column("temperature")

    # The k likeliest; 0 means all.
    top_k = column("top_k")
    rank = torch.arange(logits.shape[-1], device=logits.device)
    outside = (rank >= top_k) & (top_k > 0)  # [N, V]
    probs = scaled.masked_fill(outside, -torch.inf).softmax(dim=-1)

    # A token is kept as long as those before it sum to less than top_p.
    before = probs.cumsum(dim=-1) - probs
    return probs.masked_fill(before >= column("top_p"), 0.0), tokens
