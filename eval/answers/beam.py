"""Answers that a model generates token by token."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eval.answers.data_ranks import ALONE, Ranks
from eval.answers.likelihood import Memory
from moe import RouterOutput

_NEVER = -1e7
Step = Callable[[Tensor, Tensor], Tensor]
"""(tokens <int64>[N * K], the beam <int64>[N * K] that each continues) to logits <float>[N * K, V]."""


def beam_search(
    logits: Tensor,
    step: Step,
    *,
    num_beams: int,
    alpha: float,
    max_tokens: int,
    eos: Sequence[int],
    pad: int = 0,
    ranks: Ranks = ALONE,
) -> tuple[Tensor, Tensor]:
    """Returns for each of N inputs the best answer found, and its score.

    There are K beams that go on and the K best answers that have ended. In a step each beam is
    continued by every token, the 2 K best continuations are kept, and those that end with an end
    token compete with the answers that ended before. A score is a log-probability divided by ((5 +
    length) / 6) ** alpha, the end token counted in length. The search ends when for every input the
    worst ended answer is better than the best beam can become; an input's best answer is then the
    same whatever goes on beside it. Where no answer ends in time the best beam is returned, scored
    without the division.

    Args:
        logits: <float>[N, V] of the first token.
        step: Goes on.
        num_beams: K.
        alpha: 0 divides by nothing; larger favours longer answers.
        max_tokens: Of an answer, end token included.
        eos: End tokens.
        pad: Fills an answer behind its end.
        ranks: Those in step go on until the last of them is done.

    Returns:
        <int64>[N, T] tokens, and <float32>[N].

    Source:
        GNMT (arXiv:1609.08144) eq. 14; Mesh-TensorFlow beam_search.py at 0529176. Differs: the most
        tokens are a setting, whereas its Bitransformer derives them from the longest input of the
        batch; all tokens compete, whereas on a TPU mesh it keeps, by `num_prefilter`, the two
        likeliest of each beam and part of the vocabulary.
    """
    num_inputs, vocab_size, device = len(logits), logits.shape[-1], logits.device
    shape = (num_inputs, num_beams)
    ended_ids = alive_ids = torch.full((*shape, max_tokens), pad, device=device)
    ended_scores = torch.full(shape, _NEVER, device=device)
    has_ended = torch.zeros(shape, dtype=torch.bool, device=device)
    alive_scores = ended_scores.clone()
    alive_scores[:, 0] = 0.0
    logits = logits.repeat_interleave(num_beams, dim=0)
    ends = torch.tensor(list(eos), device=device)
    most_penalty = ((5 + max_tokens) / 6) ** alpha
    for length in range(1, max_tokens + 1):
        penalty = ((5 + length) / 6) ** alpha
        log_probs = logits.float().log_softmax(dim=-1).unflatten(0, shape) + alive_scores[..., None]
        scores, index = (log_probs / penalty).flatten(1).topk(2 * num_beams)
        beams, tokens = index // vocab_size, index % vocab_size
        ids = _take(alive_ids, beams)
        ids[..., length - 1] = tokens
        ends_now = torch.isin(tokens, ends)

        kept = (scores + ends_now * _NEVER).topk(num_beams).indices
        alive_ids, alive_scores = _take(ids, kept), (scores * penalty).gather(1, kept)
        beams, tokens = beams.gather(1, kept), tokens.gather(1, kept)

        all_scores = torch.cat([ended_scores, scores + ~ends_now * _NEVER], dim=1)
        ended_scores, best = all_scores.topk(num_beams)
        ended_ids = _take(torch.cat([ended_ids, ids], dim=1), best)
        has_ended = torch.cat([has_ended, ends_now], dim=1).gather(1, best)

        worst = (ended_scores * has_ended).amin(dim=1) + ~has_ended.any(dim=1) * _NEVER
        done = bool((worst > alive_scores[:, 0] / most_penalty).all())
        if length == max_tokens or not ranks.most(not done):
            break
        first = torch.arange(num_inputs, device=device)[:, None] * num_beams
        logits = step(tokens.flatten(), (first + beams).flatten())
    found = has_ended.any(dim=1)
    answers = torch.where(found[:, None], ended_ids[:, 0], alive_ids[:, 0])
    return answers, torch.where(found, ended_scores[:, 0], alive_scores[:, 0])


def generate_greedily(
    model: Any,
    memory: Memory,
    start: Sequence[int],
    *,
    max_tokens: int,
    eos: Sequence[int],
    pad: int,
    ranks: Ranks = ALONE,
    **options: Any,
) -> tuple[Tensor, list[RouterOutput]]:
    """Returns <int64>[N, T]: `start` and the likeliest token after each, and what the decoder's
    routers did.

    transformers' `generate` makes the same tokens; it does not say what the routers did.

    Args:
        model: Any encoder-decoder of transformers' form whose cache is an EncoderDecoderCache.
        memory: N inputs.
        start: Tokens that the decoder starts from.
        max_tokens: Of an answer, end token included.
        eos: End tokens.
        pad: Fills an answer behind its end; the routers do not count it.
        ranks: Those in step go on until the last of them is done.
        options: Further arguments of the model's forward; where there are any, the routers are told
            what is padding.
    """
    device, routers = memory.mask.device, []
    tokens = torch.tensor([list(start)] * len(memory.mask), device=device)
    goes_on, ends = memory.mask.any(dim=1), torch.tensor(list(eos), device=device)
    real, answer, cache = goes_on[:, None].expand_as(tokens), [tokens], None
    for length in range(1, max_tokens + 1):
        told = {"decoder_attention_mask": real.long(), **options} if options else {}
        output = model(
            **memory.inputs, decoder_input_ids=tokens, past_key_values=cache, use_cache=True, **told
        )
        cache = output.past_key_values
        routers += getattr(output, "decoder_router_outputs", None) or ()
        tokens = output.logits[:, -1].argmax(dim=-1).where(goes_on, pad)[:, None]
        answer.append(tokens)
        goes_on = goes_on & ~torch.isin(tokens[:, 0], ends)
        if length == max_tokens or not ranks.most(bool(goes_on.any())):
            break
        real = torch.cat([real, goes_on[:, None]], dim=1)
    return torch.cat(answer, dim=1), routers


def generate_beams(
    model: Any,
    memory: Memory,
    start: Sequence[int],
    *,
    num_beams: int,
    alpha: float,
    max_tokens: int,
    eos: Sequence[int],
    pad: int,
    ranks: Ranks = ALONE,
) -> Tensor:
    """Returns <int64>[N, T]: `start` and the answer of `beam_search` for each input, decoded with a
    cache.

    Args:
        model: Any encoder-decoder of transformers' form whose cache is an EncoderDecoderCache.
        memory: N inputs.
        start: Tokens that the decoder starts from; they count neither in scores nor in lengths.
        num_beams: See `beam_search` for this and the others.
        alpha: Of the length penalty.
        max_tokens: Of an answer.
        eos: End tokens.
        pad: Fills an answer behind its end.
        ranks: Who generates.
    """
    device = memory.mask.device
    begun = torch.tensor([list(start)] * len(memory.mask), device=device)
    output = model(**memory.inputs, decoder_input_ids=begun, use_cache=True)
    cache = output.past_key_values
    cache.batch_repeat_interleave(num_beams)
    inputs = memory.repeated(torch.arange(len(begun), device=device).repeat_interleave(num_beams))

    def step(tokens: Tensor, beams: Tensor) -> Tensor:
        cache.self_attention_cache.reorder_cache(
            beams
        )  # that of cross-attention is one for all beams of an input
        return model(
            **inputs, decoder_input_ids=tokens[:, None], past_key_values=cache, use_cache=True
        ).logits[:, -1]

    answers, _ = beam_search(
        output.logits[:, -1],
        step,
        num_beams=num_beams,
        alpha=alpha,
        max_tokens=max_tokens,
        eos=eos,
        pad=pad,
        ranks=ranks,
    )
    return torch.cat([begun, answers], dim=1)


def _take(ids: Tensor, beams: Tensor) -> Tensor:
    """Returns the rows <int64>[N, M, T] that <int64>[N, M] names of <int64>[N, K, T]."""
    return ids.gather(1, beams[..., None].expand(-1, -1, ids.shape[-1]))
