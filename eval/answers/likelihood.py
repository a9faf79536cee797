"""How likely a model finds each of the answers to choose from."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor
from transformers import EncoderDecoderCache

from eval.answers.data_ranks import ALONE, Ranks
from moe import ConfigError, RouterOutput

Normalization = Literal["none", "tokens", "characters"]
_SLICE = 1 << 30  # most bytes of the keys, values and logits of the choices that are scored at once


class Choice(NamedTuple):
    """What a model says of one choice: enough for any `Scoring`.

    Attributes:
        log_prob: Sum over its tokens, in nats, without the end token.
        eos_log_prob: Of the end token after it.
        num_tokens: Its tokens, without the end token.
    """

    log_prob: float
    eos_log_prob: float
    num_tokens: int


@dataclass(frozen=True)
class Scoring:
    """What decides between choices.

    Attributes:
        include_eos: Whether the end token counts. T5 and T0 count it, lm-evaluation-harness does
            not.
        normalize: What the log-probability is divided by: `none`, the number of `tokens` that it is
            the sum of (T5's `normalize_by_target_length`), or that of `characters`
            (lm-evaluation-harness's `acc_norm`).

    Raises:
        ConfigError: When there is no such normalisation.
    """

    include_eos: bool = True
    normalize: Normalization = "none"

    def __post_init__(self) -> None:
        if self.normalize not in get_args(Normalization):
            raise ConfigError(
                f"normalize is {self.normalize!r}; expected one of {', '.join(get_args(Normalization))}."
            )

    def score(self, text: str, choice: Choice) -> float:
        """Returns the score of the choice that reads `text`; the highest wins. An empty one counts
        as of length 1.
        """
        total = choice.log_prob + choice.eos_log_prob * self.include_eos
        lengths = {
            "none": 1,
            "tokens": choice.num_tokens + self.include_eos,
            "characters": len(text),
        }
        return total / max(1, lengths[self.normalize])


class Memory(NamedTuple):
    """Inputs that went through the encoder.

    Attributes:
        output: Of the encoder, in the model's own form; `last_hidden_state` is <float>[N, L, D].
        mask: <int64>[N, L] real tokens; none in a row that only keeps ranks in step.
    """

    output: Any
    mask: Tensor

    @property
    def inputs(self) -> dict[str, Any]:
        """What a decoding step takes."""
        return {"encoder_outputs": self.output, "attention_mask": self.mask}

    def repeated(self, rows: Tensor) -> dict[str, Any]:
        """Returns what a decoding step takes that continues the rows <int64>[R] with a cache.

        The cache holds keys and values of the memory, so that of the hidden states only the shape
        is read.
        """
        hidden = self.output.last_hidden_state[:1].expand(len(rows), -1, -1)
        return {
            "encoder_outputs": replace(self.output, last_hidden_state=hidden),
            "attention_mask": self.mask[rows],
        }


def target_log_probs(
    model: Any,
    memory: Memory,
    start: int,
    targets: Sequence[Sequence[list[int]]],
    ranks: Ranks = ALONE,
    **options: Any,
) -> tuple[list[list[list[float]]], list[list[bool]], list[RouterOutput]]:
    """Returns the log-probability of each token of each target, whether greedy decoding says it,
    what routers did.

    The decoder runs with a cache, as it does in generation: the tokens that all targets begin with
    go through it once for each input, which also makes the keys and values of cross-attention; they
    are then repeated for the targets and what is left of these goes through at once. A sparse
    decoder of this library therefore drops no token, as in generation, and a score depends on no
    other target; teacher forcing with a capacity factor could drop some. Without a capacity factor
    both are the same.

    Args:
        model: Any encoder-decoder of transformers' form whose cache is an EncoderDecoderCache.
        memory: N inputs.
        start: Token that the decoder starts from.
        targets: For each input its targets, each one token or more.
        ranks: Those in step run equally many passes, and must all call this.
        options: Further arguments of the model's forward.
    """
    device, num_inputs = memory.mask.device, len(targets)
    every = [target for own in targets for target in own]
    alike = takewhile(lambda column: len(set(column)) == 1, zip(*every, strict=False))
    shared = [column[0] for column in alike][: min(map(len, every)) - 1]
    real = memory.mask.any(dim=1, keepdim=True).long()
    output = model(
        **memory.inputs,
        decoder_input_ids=torch.tensor([[start, *shared]] * num_inputs, device=device),
        decoder_attention_mask=real.expand(-1, 1 + len(shared)),
        use_cache=True,
        **options,
    )
    routers: list[RouterOutput] = list(getattr(output, "decoder_router_outputs", None) or ())
    width = 1 + len(shared)
    owners = [row for row, own in enumerate(targets) for _ in own]
    heads = torch.tensor([target[:width] for target in every], device=device)
    found, greedy = _picked(output.logits, heads, torch.tensor(owners, device=device))

    past = output.past_key_values
    bytes_per_token = 2 * output.logits.shape[-1] * 4
    order = sorted(
        (n for n, target in enumerate(every) if len(target) > width), key=lambda n: -len(every[n])
    )
    slices = list(
        _slices([(n, len(every[n]) - width) for n in order], _bytes_per_row(past), bytes_per_token)
    )
    slices += [[]] * (ranks.most(len(slices)) - len(slices))
    for members in slices:  # an empty one only keeps ranks in step
        tails = [every[n][width:] for n in members] or [[start]]
        longest = max(map(len, tails))
        inputs = [every[n][width - 1 : -1] for n in members] or [[start]]
        rows = torch.tensor([owners[n] for n in members] or [0], device=device)
        mask = [[1] * (width + len(tail)) + [0] * (longest - len(tail)) for tail in tails]
        output = model(
            **memory.repeated(rows),
            decoder_input_ids=_padded(inputs, start, device),
            decoder_attention_mask=torch.tensor(mask, device=device)
            * (real[rows] if members else 0),
            past_key_values=_rows_of(past, rows),
            use_cache=True,
            **options,
        )
        routers += getattr(output, "decoder_router_outputs", None) or ()
        log_probs, likeliest = _picked(output.logits, _padded(tails, start, device))
        for row, n in enumerate(members):
            found[n] += log_probs[row][: len(tails[row])]
            greedy[n] += likeliest[row][: len(tails[row])]
    values, flags = iter(found), iter(greedy)
    return (
        [[next(values) for _ in own] for own in targets],
        [[all(next(flags)) for _ in own] for own in targets],
        routers,
    )


def _picked(
    logits: Tensor, tokens: Tensor, rows: Tensor | None = None
) -> tuple[list[list[float]], list[list[bool]]]:
    """Returns what is said of tokens <int64>[R, T] under <float>[N, T, V], by row <int64>[R] or row
    by row.

    Returns:
        [R][T] log-probabilities, and whether no token is likelier.
    """
    logits = logits.float()
    most, normalizer = logits.max(dim=-1).values, logits.logsumexp(dim=-1)
    rows = torch.arange(len(tokens), device=tokens.device) if rows is None else rows
    places = torch.arange(tokens.shape[1], device=tokens.device)
    picked = logits[rows[:, None], places, tokens]
    return (picked - normalizer[rows]).tolist(), (picked >= most[rows]).tolist()


def _padded(rows: list[list[int]], pad: int, device: torch.device) -> Tensor:
    """Returns <int64>[R, T] of rows of different lengths."""
    longest = max(map(len, rows))
    return torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=device)


def _rows_of(cache: EncoderDecoderCache, rows: Tensor) -> EncoderDecoderCache:
    """Returns a cache of the rows <int64>[R] of another, which is left as it is."""
    halves = [copy.copy(half) for half in (cache.self_attention_cache, cache.cross_attention_cache)]
    for half in halves:
        half.layers = [copy.copy(layer) for layer in half.layers]
    chosen = EncoderDecoderCache(*halves)
    chosen.batch_select_indices(rows)
    return chosen


def _bytes_per_row(cache: EncoderDecoderCache) -> int:
    """Returns how much memory the cache of one row takes."""
    layers = cast(Any, [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers])
    return sum(
        x[0].numel() * x.element_size() for layer in layers for x in (layer.keys, layer.values)
    )


def _slices(
    lengths: list[tuple[int, int]], bytes_per_row: int, bytes_per_token: int
) -> Iterator[list[int]]:
    """Gives the names of rows that fit into memory together; `lengths` has (name, tokens), the
    longest first.
    """
    while lengths:
        size = max(1, _SLICE // (bytes_per_row + lengths[0][1] * bytes_per_token))
        yield [name for name, _ in lengths[:size]]
        lengths = lengths[size:]
