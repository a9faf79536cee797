"""Log-likelihoods of the choices of a question, and the choice with the highest score."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from transformers import EncoderDecoderCache

from moe.sparse.layer import RouterOutput
from stmoe_eval.answers.batches import pad_tokens
from stmoe_eval.answers.data_ranks import SINGLE_PROCESS, DataRanks

Normalization = Literal["none", "tokens", "characters"]

_MAX_BYTES = 1 << 30
"""Most bytes of the keys, values and logits of the targets that are scored in one pass."""


# ---------------------------------------------------------------------------
# Which choice wins


class ChoiceLikelihood(NamedTuple):
    """Log-likelihood of one choice, in the parts that any `Scoring` needs.

    Attributes:
        log_prob: Sum over its tokens, in nats, without the end token.
        eos_log_prob: Log-probability of the end token after it.
        num_tokens: Its tokens, without the end token.
    """

    log_prob: float
    eos_log_prob: float
    num_tokens: int


class Scoring(NamedTuple):
    """How choices are scored.

    Attributes:
        include_eos: Whether the end token counts. T5 and T0 count it, lm-evaluation-harness does
            not.
        normalize: Divisor of the log-probability: `none`, its number of `tokens` (T5's
            `normalize_by_target_length`), or that of `characters` (lm-evaluation-harness's
            `acc_norm`).
    """

    include_eos: bool = True
    normalize: Normalization = "none"

    def score(self, text: str, choice: ChoiceLikelihood) -> float:
        """Returns the score of a choice; the highest wins.

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
    """Encoded inputs.

    Attributes:
        output: Output of the encoder, in the model's own form; `last_hidden_state` is <float>[N, L, D].
        mask: <int64>[N, L] 1 at real tokens. A row of zeros that only keeps ranks in lockstep.
    """

    output: Any
    mask: Tensor

    def model_inputs(self) -> dict[str, Any]:
        """Returns the encoder's part of the arguments of the model's forward."""
        return {"encoder_outputs": self.output, "attention_mask": self.mask}

    def cached_inputs(self, rows: Tensor) -> dict[str, Any]:
        """Returns the same for rows <int64>[R] that continue a cache.

        The cache holds keys and values of the hidden states, so only their shape is read.
        """
        hidden = self.output.last_hidden_state[:1].expand(len(rows), -1, -1)  # [R, L, D]
        cached = replace(self.output, last_hidden_state=hidden)
        if self.output.get("prefix_numbers") is not None:
            cached.prefix_numbers = self.output.prefix_numbers[rows]  # [R, L]
        return {"encoder_outputs": cached, "attention_mask": self.mask[rows]}


class TargetLogProbs(NamedTuple):
    """Log-probabilities of the targets of N inputs.

    Attributes:
        log_probs: Log-probability of each token, by input and target.
        routers: Router outputs of the decoder's layers in each pass; empty unless requested.
    """

    log_probs: list[list[list[float]]]
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

    The decoder runs with a cache, as in generation. The common prefix of all targets is computed
    once per input, which also makes the keys and values of cross-attention. These are then repeated
    for the targets, and the rest of each target is computed in one pass.

    A sparse decoder of this library therefore drops no token, as in generation, and a score does
    not depend on other targets; teacher forcing with a capacity factor could drop some. Without a
    capacity factor both give the same numbers.

    Args:
        model: Any encoder-decoder of transformers' form whose cache is an EncoderDecoderCache.
        encoded: N inputs.
        start: Token that the decoder starts from.
        targets: For each input its targets, each of one token or more.
        ranks: Ranks in lockstep run equally many passes, and must all call this.
        report_routers: Whether to collect router outputs; only sparse models of this library have
            them.

    Returns:
        Log-probabilities, and the outputs of the routers.
    """
    device = encoded.mask.device
    has_input = encoded.mask.any(dim=1, keepdim=True).long()  # [N, 1]
    options: dict[str, Any] = {"use_cache": True}
    if report_routers:
        options["output_router_logits"] = True
    routers: list[RouterOutput] = []

    # The R targets of all inputs, and the row of the input that each belongs to.
    tokens, is_real, row_of_target = _flatten(targets, start, device)
    lengths = is_real.sum(dim=1)  # [R]

    # First pass, once per input: the start and the common prefix, which predict `width` tokens.
    width = _common_prefix_length(tokens, lengths) + 1
    inputs = torch.full((len(targets), width), start, device=device)  # [N, width]
    inputs[:, 1:] = tokens[0, : width - 1]
    output = model(
        **encoded.model_inputs(),
        decoder_input_ids=inputs,
        decoder_attention_mask=has_input.expand(-1, width),
        **options,
    )
    cache = output.past_key_values
    routers += getattr(output, "decoder_router_outputs", None) or ()

    log_probs = torch.zeros(tokens.shape, device=device)  # [R, T]
    log_probs[:, :width] = _token_log_probs(output.logits, tokens[:, :width], row_of_target)

    def continue_rows(rows: Tensor, inputs: Tensor, mask: Tensor) -> Tensor:
        """Returns the logits [R', T', V] of inputs [R', T'] after the cached prefix of some rows."""
        output = model(
            **encoded.cached_inputs(rows),
            decoder_input_ids=inputs,
            decoder_attention_mask=mask,
            past_key_values=_select_rows(cache, rows),
            **options,
        )
        routers.extend(getattr(output, "decoder_router_outputs", None) or ())
        return output.logits

    # The rest of the longer targets, the longest first, in passes that fit into memory.
    order = lengths.argsort(descending=True, stable=True)
    order = order[lengths[order] > width]
    bytes_per_token = 2 * output.logits.shape[-1] * 4  # logits and a copy, in float32
    tail_lengths = (lengths[order] - width).tolist()
    sizes = _pass_sizes(tail_lengths, _bytes_per_row(cache), bytes_per_token)
    num_idle_passes = ranks.max_in_lockstep(len(sizes)) - len(sizes)
    for members in order.split(sizes):  # [R']
        longest = int(lengths[members[0]])
        rows = row_of_target[members]

        # Each input token predicts the next one; shorter targets are padded.
        is_tail = is_real[members, width:longest].bool()  # [R', T']
        inputs = tokens[members, width - 1 : longest - 1].where(is_tail, start)
        mask = is_real[members, :longest] * has_input[rows]  # [R', width + T']
        logits = continue_rows(rows, inputs, mask)

        log_probs[members, width:longest] = _token_log_probs(logits, tokens[members, width:longest])

    # Ranks in lockstep make equally many passes; passes with only padding are not counted.
    for _ in range(num_idle_passes):
        first_row = torch.zeros(1, dtype=torch.long, device=device)
        no_tokens = torch.zeros(1, width + 1, dtype=torch.long, device=device)
        continue_rows(first_row, torch.full_like(no_tokens[:, :1], start), no_tokens)

    return TargetLogProbs(_by_input(targets, log_probs.tolist()), routers)


class _FlatTargets(NamedTuple):
    """The R targets of N inputs in one list.

    Attributes:
        tokens: <int64>[R, T] padded.
        is_real: <int64>[R, T] 1 at real tokens.
        rows: <int64>[R] the input that each belongs to.
    """

    tokens: Tensor
    is_real: Tensor
    rows: Tensor


def _flatten(
    targets: Sequence[Sequence[list[int]]], pad: int, device: torch.device
) -> _FlatTargets:
    flat_targets: list[list[int]] = []
    rows: list[int] = []
    for row, targets_of_row in enumerate(targets):
        flat_targets += targets_of_row
        rows += [row] * len(targets_of_row)
    tokens, is_real = pad_tokens(flat_targets, pad, device)
    return _FlatTargets(tokens, is_real, torch.tensor(rows, device=device))


def _common_prefix_length(tokens: Tensor, lengths: Tensor) -> int:
    """Returns how many first tokens of targets [R, T] are equal; at least one token of each remains."""
    shortest = int(lengths.min())
    is_equal = (tokens[:, : shortest - 1] == tokens[0, : shortest - 1]).all(dim=0)
    return int(is_equal.long().cumprod(dim=0).sum())


def _token_log_probs(logits: Tensor, tokens: Tensor, rows: Tensor | None = None) -> Tensor:
    """Returns the log-probability <float32>[R, T] of each token.

    Args:
        logits: <float>[N, T, V]
        tokens: <int64>[R, T] the tokens at these positions.
        rows: <int64>[R] the row of `logits` for each row of `tokens`; None if they are the same.
    """
    logits = logits.float()
    normalizer = logits.logsumexp(dim=-1)  # [N, T]

    # Several targets may belong to one row of logits.
    if rows is None:
        rows = torch.arange(len(tokens), device=tokens.device)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    token_logits = logits[rows[:, None], positions, tokens]  # [R, T]
    return token_logits - normalizer[rows]


def _by_input(
    targets: Sequence[Sequence[list[int]]], log_probs: list[list[float]]
) -> list[list[list[float]]]:
    """Returns the log-probabilities of all targets, without padding, by input."""
    rows = iter(log_probs)
    by_input: list[list[list[float]]] = []
    for targets_of_row in targets:
        by_input.append([next(rows)[: len(target)] for target in targets_of_row])
    return by_input


def _select_rows(cache: EncoderDecoderCache, rows: Tensor) -> EncoderDecoderCache:
    """Returns a cache of the rows <int64>[R] of another, which is unchanged."""
    # A shallow copy of each layer: selecting replaces its tensors, and keeps the original's.
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
        # All rows of a pass are as long as its first.
        bytes_of_longest = bytes_per_row + lengths[num_taken] * bytes_per_token
        size = max(1, _MAX_BYTES // bytes_of_longest)
        sizes.append(min(size, len(lengths) - num_taken))
        num_taken += size
    return sizes
