"""Answers generated token by token: greedy decoding and beam search.

Both decode with a cache, so that each step computes one new token of each answer. likelihood.py is
the other way to answer: it scores given choices.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stmoe_eval.answers.data_ranks import SINGLE_PROCESS, DataRanks
from stmoe_eval.answers.likelihood import EncodedInputs

_MINUS_INFINITY = -1e7
"""Score of a hypothesis that does not exist; finite, so that 0 times it is 0."""

DecodeStep = Callable[[Tensor, Tensor], Tensor]
"""(tokens <int64>[N * K], the beam <int64>[N * K] that each continues) to logits <float>[N * K, V]."""


class _Beams(NamedTuple):
    """Hypotheses that are still growing, best first.

    Attributes:
        tokens: <int64>[N, K, T] padded after the length reached so far.
        log_probs: <float32>[N, K] sum over the tokens.
    """

    tokens: Tensor
    log_probs: Tensor


class _Candidates(NamedTuple):
    """The 2 K best continuations of all beams by one token.

    Attributes:
        tokens: <int64>[N, 2K, T] whole hypotheses.
        scores: <float32>[N, 2K] log-probabilities over the length penalty.
        last_tokens: <int64>[N, 2K] the token of this step.
        parents: <int64>[N, 2K] beam that each continues.
        is_finished: <bool>[N, 2K] whether this step's token ends it.
    """

    tokens: Tensor
    scores: Tensor
    last_tokens: Tensor
    parents: Tensor
    is_finished: Tensor


class _Finished(NamedTuple):
    """The best hypotheses that have ended, best first.

    Attributes:
        tokens: <int64>[N, K, T]
        scores: <float32>[N, K] log-probabilities over the length penalty.
        is_real: <bool>[N, K] False where fewer than K have ended.
    """

    tokens: Tensor
    scores: Tensor
    is_real: Tensor


class BeamAnswers(NamedTuple):
    """The best hypothesis of each input.

    Attributes:
        tokens: <int64>[N, T] padded after the end token.
        scores: <float32>[N]
    """

    tokens: Tensor
    scores: Tensor


def beam_search(
    logits: Tensor,
    step: DecodeStep,
    *,
    num_beams: int,
    alpha: float,
    max_tokens: int,
    eos: Sequence[int],
    pad: int = 0,
    ranks: DataRanks = SINGLE_PROCESS,
) -> BeamAnswers:
    """Returns the best answer found for each of N inputs, and its score.

    K beams grow, and the K best finished hypotheses are kept separately. Each step continues every
    beam by every token and keeps the 2 K best continuations: at most K of them end, so K can keep
    growing. A score is the log-probability divided by the length penalty ((5 + length) / 6) **
    alpha, with the end token counted in the length. The search stops once the worst finished
    hypothesis of every input beats the best score that its beams can still reach; the other inputs
    of a batch do not change an answer. When nothing ends in time, the best beam is returned with
    its plain log-probability.

    Args:
        logits: <float>[N, V] of the first token.
        step: Decodes one more token of every beam.
        num_beams: K.
        alpha: Strength of the length penalty. 0 is none; larger favours longer answers.
        max_tokens: Maximum number of tokens of an answer, end token included.
        eos: End tokens.
        pad: Fills an answer after its end.
        ranks: Ranks in lockstep decode until the last one has finished.

    Returns:
        Tokens <int64>[N, T] and scores <float32>[N].

    Source:
        GNMT (arXiv:1609.08144) eq. 14; Mesh-TensorFlow beam_search.py at 0529176. Differs: the
        maximum number of tokens is a setting, whereas its Bitransformer derives them from the
        longest input of the batch; all tokens compete, whereas on a TPU mesh it keeps, by
        `num_prefilter`, the two likeliest of each beam and part of the vocabulary.
    """
    num_inputs = len(logits)
    device = logits.device
    eos_tokens = torch.tensor(list(eos), device=device)
    first_row = torch.arange(num_inputs, device=device)[:, None] * num_beams  # [N, 1]

    # All K beams start as the empty hypothesis; only the first counts, or all would stay equal.
    empty = torch.full((num_inputs, num_beams, max_tokens), pad, device=device)  # [N, K, T]
    no_score = torch.full((num_inputs, num_beams), _MINUS_INFINITY, device=device)  # [N, K]
    log_probs = no_score.clone()
    log_probs[:, 0] = 0.0
    running = _Beams(empty, log_probs)
    finished = _Finished(empty, no_score, torch.zeros_like(no_score, dtype=torch.bool))
    logits = logits.repeat_interleave(num_beams, dim=0)  # [N * K, V]

    # The penalty of the longest answer bounds the score of a growing beam.
    largest_penalty = _length_penalty(max_tokens, alpha)

    for length in range(1, max_tokens + 1):
        penalty = _length_penalty(length, alpha)
        candidates = _best_continuations(running, logits, length, penalty, eos_tokens)

        # The K best unfinished beams keep growing.
        kept = (
            (candidates.scores + candidates.is_finished * _MINUS_INFINITY).topk(num_beams).indices
        )
        running = _Beams(
            tokens=_select(candidates.tokens, kept),
            log_probs=(candidates.scores * penalty).gather(1, kept),
        )
        last_tokens = candidates.last_tokens.gather(1, kept)
        parents = candidates.parents.gather(1, kept)

        # Hypotheses that end now compete with those that ended before.
        finished = _best_finished(finished, candidates, num_beams)

        is_done = _cannot_improve(finished, running, largest_penalty)
        if length == max_tokens or not ranks.max_in_lockstep(not is_done):
            break
        logits = step(last_tokens.flatten(), (first_row + parents).flatten())

    has_answer = finished.is_real.any(dim=1)  # [N]
    return BeamAnswers(
        torch.where(has_answer[:, None], finished.tokens[:, 0], running.tokens[:, 0]),
        torch.where(has_answer, finished.scores[:, 0], running.log_probs[:, 0]),
    )


def _length_penalty(length: int, alpha: float) -> float:
    return ((5 + length) / 6) ** alpha  # GNMT eq. 14


def _best_continuations(
    running: _Beams, logits: Tensor, length: int, penalty: float, eos_tokens: Tensor
) -> _Candidates:
    """Returns the 2 K best continuations of the beams by one token, under logits [N * K, V]."""
    num_inputs, num_beams = running.log_probs.shape
    vocab_size = logits.shape[-1]

    # Log-probability of each beam extended by each token.
    log_probs = logits.float().log_softmax(dim=-1).unflatten(0, (num_inputs, num_beams))
    log_probs = log_probs + running.log_probs[..., None]  # [N, K, V]

    # All beams of an input compete; an index encodes beam and token.
    scores, index = (log_probs / penalty).flatten(1).topk(2 * num_beams)  # [N, 2K]
    parents = index // vocab_size
    last_tokens = index % vocab_size

    tokens = _select(running.tokens, parents)  # [N, 2K, T]
    tokens[..., length - 1] = last_tokens
    return _Candidates(
        tokens=tokens,
        scores=scores,
        last_tokens=last_tokens,
        parents=parents,
        is_finished=torch.isin(last_tokens, eos_tokens),
    )


def _best_finished(finished: _Finished, candidates: _Candidates, num_beams: int) -> _Finished:
    """Returns the K best of the finished hypotheses and the candidates that end now."""
    ended_scores = candidates.scores + ~candidates.is_finished * _MINUS_INFINITY
    all_scores = torch.cat([finished.scores, ended_scores], dim=1)  # [N, 3K]
    all_tokens = torch.cat([finished.tokens, candidates.tokens], dim=1)  # [N, 3K, T]
    all_real = torch.cat([finished.is_real, candidates.is_finished], dim=1)  # [N, 3K]

    scores, best = all_scores.topk(num_beams)
    return _Finished(_select(all_tokens, best), scores, all_real.gather(1, best))


def _cannot_improve(finished: _Finished, running: _Beams, largest_penalty: float) -> bool:
    """Returns whether no growing beam of any input can still beat its worst finished hypothesis."""
    worst_finished = (finished.scores * finished.is_real).amin(dim=1)  # [N]
    has_none = ~finished.is_real.any(dim=1)
    worst_finished = worst_finished + has_none * _MINUS_INFINITY
    best_reachable = running.log_probs[:, 0] / largest_penalty
    return bool((worst_finished > best_reachable).all())


def _select(tokens: Tensor, beams: Tensor) -> Tensor:
    return tokens.gather(1, beams[..., None].expand(-1, -1, tokens.shape[-1]))


def generate_greedily(
    model: Any,
    encoded: EncodedInputs,
    start: Sequence[int],
    *,
    max_tokens: int,
    eos: Sequence[int],
    pad: int,
    ranks: DataRanks = SINGLE_PROCESS,
    masks_ended: bool = False,
) -> Tensor:
    """Returns `start` and the greedy answer to each input, decoded with a cache.

    Args:
        model: Any encoder-decoder of transformers' form whose cache is an EncoderDecoderCache.
        encoded: N inputs.
        start: Tokens that the decoder starts from.
        max_tokens: Most tokens of an answer, end token included.
        eos: End tokens.
        pad: Fills an answer after its end.
        ranks: Data ranks; those in lockstep decode until the last one has finished.
        masks_ended: Whether to mask what fills ended answers, so that no expert serves it.

    Returns:
        <int64>[N, T]
    """
    device = encoded.mask.device
    eos_tokens = torch.tensor(list(eos), device=device)
    tokens = torch.tensor([list(start)] * len(encoded.mask), device=device)  # [N, S]
    is_running = encoded.mask.any(dim=1)  # [N]
    is_real = is_running[:, None].expand_as(tokens)  # [N, S]
    answer = [tokens]
    cache = None

    for length in range(1, max_tokens + 1):
        options = {"decoder_attention_mask": is_real.long()} if masks_ended else {}
        output = model(
            **encoded.model_inputs(),
            decoder_input_ids=tokens,
            past_key_values=cache,
            use_cache=True,
            **options,
        )
        cache = output.past_key_values

        # An answer that has ended is continued by padding.
        tokens = output.logits[:, -1].argmax(dim=-1).where(is_running, pad)[:, None]  # [N, 1]
        answer.append(tokens)
        is_running = is_running & ~torch.isin(tokens[:, 0], eos_tokens)
        if length == max_tokens or not ranks.max_in_lockstep(bool(is_running.any())):
            break
        is_real = torch.cat([is_real, is_running[:, None]], dim=1)  # [N, S + length]
    return torch.cat(answer, dim=1)


def generate_beams(
    model: Any,
    encoded: EncodedInputs,
    start: Sequence[int],
    *,
    num_beams: int,
    alpha: float,
    max_tokens: int,
    eos: Sequence[int],
    pad: int,
    ranks: DataRanks = SINGLE_PROCESS,
) -> Tensor:
    """Returns `start` and the answer of `beam_search` for each input, decoded with a cache.

    Args:
        model: Any encoder-decoder of transformers' form whose cache is an EncoderDecoderCache.
        encoded: N inputs.
        start: Tokens that the decoder starts from; they count neither in scores nor in lengths.
        num_beams: K.
        alpha: Strength of the length penalty.
        max_tokens: Most tokens of an answer, end token included.
        eos: End tokens.
        pad: Fills an answer after its end.
        ranks: Data ranks; those in lockstep decode until the last one has finished.

    Returns:
        <int64>[N, T]
    """
    device = encoded.mask.device
    num_inputs = len(encoded.mask)

    # One pass over the start also makes the keys and values of cross-attention, once per input.
    start_tokens = torch.tensor([list(start)] * num_inputs, device=device)  # [N, S]
    output = model(**encoded.model_inputs(), decoder_input_ids=start_tokens, use_cache=True)
    cache = output.past_key_values
    cache.batch_repeat_interleave(num_beams)
    rows = torch.arange(num_inputs, device=device).repeat_interleave(num_beams)  # [N * K]
    model_inputs = encoded.cached_inputs(rows)

    def step(tokens: Tensor, beams: Tensor) -> Tensor:
        # Only self-attention differs between the beams of an input.
        cache.self_attention_cache.reorder_cache(beams)
        output = model(
            **model_inputs, decoder_input_ids=tokens[:, None], past_key_values=cache, use_cache=True
        )
        return output.logits[:, -1]

    answers = beam_search(
        output.logits[:, -1],
        step,
        num_beams=num_beams,
        alpha=alpha,
        max_tokens=max_tokens,
        eos=eos,
        pad=pad,
        ranks=ranks,
    )
    return torch.cat([start_tokens, answers.tokens], dim=1)  # [N, S + T]
