"""How likely a model finds each of the answers to choose from, and which of them a scoring prefers."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor
from transformers import EncoderDecoderCache

from eval.answers.data_ranks import SINGLE_PROCESS, DataRanks
from moe.errors import ConfigError
from moe.sparse.layer import RouterOutput

Normalization = Literal["none", "tokens", "characters"]

_MAX_BYTES = 1 << 30
"""Most bytes of the keys, values and logits of the targets that are scored in one pass."""


# ---------------------------------------------------------------------------
# Which choice wins


class ChoiceLikelihood(NamedTuple):
    """How likely a model finds one choice: enough for any `Scoring`.

    Attributes:
        log_prob: Sum over its tokens, in nats, without the end token.
        eos_log_prob: Log-probability of the end token after it.
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
        known = get_args(Normalization)
        if self.normalize not in known:
            raise ConfigError(
                f"normalize is {self.normalize!r}; expected one of {', '.join(known)}."
            )

    def score(self, text: str, choice: ChoiceLikelihood) -> float:
        """Returns the score of the choice that reads `text`; the highest wins.

        An empty choice is divided by 1.
        """
        log_prob = choice.log_prob + choice.eos_log_prob * self.include_eos
        if self.normalize == "tokens":
            return log_prob / max(1, choice.num_tokens + self.include_eos)
        if self.normalize == "characters":
            return log_prob / max(1, len(text))
        return log_prob


# ---------------------------------------------------------------------------
# Log-probabilities


class EncodedInputs(NamedTuple):
    """Inputs that went through the encoder.

    Attributes:
        output: Of the encoder, in the model's own form; `last_hidden_state` is <float>[N, L, D].
        mask: <int64>[N, L] 1 at real tokens. A row of zeros only keeps ranks in lockstep.
    """

    output: Any
    mask: Tensor

    def model_inputs(self) -> dict[str, Any]:
        """Returns the encoder's part of the arguments of the model's forward."""
        return {"encoder_outputs": self.output, "attention_mask": self.mask}

    def cached_inputs(self, rows: Tensor) -> dict[str, Any]:
        """Returns these arguments where the rows <int64>[R] are continued with a cache.

        The cache holds keys and values of the hidden states, so only their shape is read.
        """
        hidden = self.output.last_hidden_state[:1].expand(len(rows), -1, -1)  # [R, L, D]
        return {
            "encoder_outputs": replace(self.output, last_hidden_state=hidden),
            "attention_mask": self.mask[rows],
        }


class TargetLogProbs(NamedTuple):
    """What a model says of the targets of N inputs.

    Attributes:
        log_probs: Of each token, by input and target.
        is_greedy: Whether greedy decoding gives the target, by input and target.
        routers: Of the decoder's layers in each pass; empty unless asked for.
    """

    log_probs: list[list[list[float]]]
    is_greedy: list[list[bool]]
    routers: list[RouterOutput]


def target_log_probs(
    model: Any,
    encoded: EncodedInputs,
    start: int,
    targets: Sequence[Sequence[list[int]]],
    ranks: DataRanks = SINGLE_PROCESS,
    *,
    report_routers: bool = False,
) -> TargetLogProbs:
    """Returns the log-probability of each token of each target of N inputs.

    The decoder runs with a cache, as in generation. The tokens that all targets begin with go
    through it once for each input, which also makes the keys and values of cross-attention. These
    are then repeated for the targets, and what is left of each target goes through in one pass.

    A sparse decoder of this library therefore drops no token, as in generation, and a score depends
    on no other target; teacher forcing with a capacity factor could drop some. Without a capacity
    factor both give the same numbers.

    Args:
        model: Any encoder-decoder of transformers' form whose cache is an EncoderDecoderCache.
        encoded: N inputs.
        start: Token that the decoder starts from.
        targets: For each input its targets, each of one token or more.
        ranks: Those in lockstep run equally many passes, and must all call this.
        report_routers: Whether the model is asked what its routers did; only a sparse model of this
            library can say it.

    Returns:
        Log-probabilities, whether each target is the greedy answer, and the outputs of the routers.
    """
    device = encoded.mask.device
    num_inputs = len(targets)
    has_input = encoded.mask.any(dim=1, keepdim=True).long()  # [N, 1]
    options: dict[str, Any] = {"use_cache": True}
    if report_routers:
        options["output_router_logits"] = True

    # All R targets in one list, and the input of each.
    flat_targets: list[list[int]] = []
    owners: list[int] = []
    for row, targets_of_row in enumerate(targets):
        flat_targets += targets_of_row
        owners += [row] * len(targets_of_row)

    # First pass, once an input: the start and the common prefix, which predict `width` tokens.
    prefix = _common_prefix(flat_targets)
    width = 1 + len(prefix)
    output = model(
        **encoded.model_inputs(),
        decoder_input_ids=torch.tensor([[start, *prefix]] * num_inputs, device=device),
        decoder_attention_mask=has_input.expand(-1, width),
        **options,
    )
    cache = output.past_key_values
    routers: list[RouterOutput] = list(getattr(output, "decoder_router_outputs", None) or ())
    heads = torch.tensor([target[:width] for target in flat_targets], device=device)  # [R, width]
    scored = _score_tokens(output.logits, heads, torch.tensor(owners, device=device))

    # The rest of the longer targets, in passes that fit into memory; all ranks make equally many.
    unfinished = [n for n, target in enumerate(flat_targets) if len(target) > width]
    unfinished.sort(key=lambda n: -len(flat_targets[n]))
    bytes_per_token = 2 * output.logits.shape[-1] * 4  # logits and their copy, in float32
    tail_lengths = [len(flat_targets[n]) - width for n in unfinished]
    sizes = _pass_sizes(tail_lengths, _bytes_per_row(cache), bytes_per_token)
    sizes += [0] * (ranks.max_in_lockstep(len(sizes)) - len(sizes))

    for size in sizes:
        members = unfinished[:size]
        unfinished = unfinished[size:]

        # Tokens to predict, and the ones before them that go in. Without a target the pass only
        # keeps ranks in lockstep.
        tails = [flat_targets[n][width:] for n in members] or [[start]]
        inputs = [flat_targets[n][width - 1 : -1] for n in members] or [[start]]
        rows = torch.tensor([owners[n] for n in members] or [0], device=device)  # [R']
        is_real = has_input[rows] if members else 0
        output = model(
            **encoded.cached_inputs(rows),
            decoder_input_ids=_padded(inputs, start, device),
            decoder_attention_mask=_tail_mask(tails, width, device) * is_real,
            past_key_values=_select_rows(cache, rows),
            **options,
        )
        routers += getattr(output, "decoder_router_outputs", None) or ()

        scored_tails = _score_tokens(output.logits, _padded(tails, start, device))
        for row, n in enumerate(members):
            scored.log_probs[n] += scored_tails.log_probs[row][: len(tails[row])]
            scored.is_argmax[n] += scored_tails.is_argmax[row][: len(tails[row])]

    return _by_input(targets, scored, routers)


class _ScoredTokens(NamedTuple):
    """What a model says of the tokens of R targets.

    Attributes:
        log_probs: By target and token.
        is_argmax: Whether no other token is likelier, by target and token.
    """

    log_probs: list[list[float]]
    is_argmax: list[list[bool]]


def _score_tokens(logits: Tensor, tokens: Tensor, rows: Tensor | None = None) -> _ScoredTokens:
    """Returns the log-probability of each token, and whether it is the argmax.

    Args:
        logits: <float>[N, T, V]
        tokens: <int64>[R, T] the tokens at these positions.
        rows: <int64>[R] the row of `logits` for each row of `tokens`; None when they are the same.
    """
    logits = logits.float()
    max_logits = logits.max(dim=-1).values  # [N, T]
    normalizer = logits.logsumexp(dim=-1)  # [N, T]

    if rows is None:
        rows = torch.arange(len(tokens), device=tokens.device)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    token_logits = logits[rows[:, None], positions, tokens]  # [R, T]
    return _ScoredTokens(
        log_probs=(token_logits - normalizer[rows]).tolist(),
        is_argmax=(token_logits >= max_logits[rows]).tolist(),
    )


def _by_input(
    targets: Sequence[Sequence[list[int]]], scored: _ScoredTokens, routers: list[RouterOutput]
) -> TargetLogProbs:
    """Returns what was found of all targets in one list, by input and target."""
    log_probs: list[list[list[float]]] = []
    is_greedy: list[list[bool]] = []
    first = 0
    for targets_of_row in targets:
        last = first + len(targets_of_row)
        log_probs.append(scored.log_probs[first:last])
        is_greedy.append([all(flags) for flags in scored.is_argmax[first:last]])
        first = last
    return TargetLogProbs(log_probs, is_greedy, routers)


def _common_prefix(targets: Sequence[list[int]]) -> list[int]:
    """Returns the tokens that all targets begin with; at least one token of each is left over."""
    prefix: list[int] = []
    for position in range(min(map(len, targets)) - 1):
        token = targets[0][position]
        if any(target[position] != token for target in targets):
            break
        prefix.append(token)
    return prefix


def _padded(rows: list[list[int]], pad: int, device: torch.device) -> Tensor:
    """Returns <int64>[R, T] of rows of different lengths."""
    longest = max(map(len, rows))
    return torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=device)


def _tail_mask(tails: list[list[int]], width: int, device: torch.device) -> Tensor:
    """Returns <int64>[R, width + T]: 1 at the `width` tokens in the cache and at those of a tail."""
    ones = [[1] * (width + len(tail)) for tail in tails]
    return _padded(ones, 0, device)


def _select_rows(cache: EncoderDecoderCache, rows: Tensor) -> EncoderDecoderCache:
    """Returns a cache of the rows <int64>[R] of another, which is left as it is."""
    parts = [copy.copy(cache.self_attention_cache), copy.copy(cache.cross_attention_cache)]
    for part in parts:
        part.layers = [copy.copy(layer) for layer in part.layers]
    selected = EncoderDecoderCache(*parts)
    selected.batch_select_indices(rows)
    return selected


def _bytes_per_row(cache: EncoderDecoderCache) -> int:
    """Returns how much memory the cache of one row takes."""
    layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    num_bytes = 0
    for layer in cast(list[Any], layers):
        for tensor in (layer.keys, layer.values):
            num_bytes += tensor[0].numel() * tensor.element_size()
    return num_bytes


def _pass_sizes(lengths: Sequence[int], bytes_per_row: int, bytes_per_token: int) -> list[int]:
    """Returns how many rows, of the longest first, fit into memory in each pass.

    Args:
        lengths: Tokens of each row, the longest first.
        bytes_per_row: Memory of a row's cache.
        bytes_per_token: Memory of a token's logits.
    """
    sizes: list[int] = []
    num_taken = 0
    while num_taken < len(lengths):
        bytes_of_longest = bytes_per_row + lengths[num_taken] * bytes_per_token
        size = max(1, _MAX_BYTES // bytes_of_longest)
        sizes.append(min(size, len(lengths) - num_taken))
        num_taken += size
    return sizes
