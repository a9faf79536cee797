"""Blocks and stacks: attention, dense and sparse feed-forward layers around a residual stream."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer

from moe.distributed.exchange import enter_shards, leave_shards
from moe.models.attention import Attention, Projection, RelativePositionBias, RMSNorm, mask_bias
from moe.models.configuration import STMoEConfig
from moe.sparse.layer import RouterOutput, SparseFeedForward


class FeedForward(nn.Module):
    """The dense feed-forward layer: GEGLU with tanh GELU, or ReLU; no biases."""

    def __init__(self, config: STMoEConfig) -> None:
        super().__init__()
        self.config = config
        self.gated = config.feed_forward_proj == "gated-gelu"
        d_hidden, scale = config.d_ff * (2 if self.gated else 1), config.initializer_scale
        self.up_proj = Projection(config.d_model, d_hidden, std=math.sqrt(scale / config.d_model), truncated=True)
        self.down_proj = Projection(config.d_ff, config.d_model, std=math.sqrt(scale / config.d_ff), truncated=True)
        self.tp: ProcessGroup | None = None  # ranks that hold the other hidden units

    def forward(self, x: Tensor) -> Tensor:
        """Returns <float>[B, L, D] of <float>[B, L, D]."""
        hidden = self.up_proj(enter_shards(x, self.tp))
        if self.gated:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = F.gelu(gate, approximate="tanh") * up
        else:
            hidden = F.relu(hidden)
        return leave_shards(self.down_proj(F.dropout(hidden, self.config.dropout_rate, self.training)), self.tp)


class Context(NamedTuple):
    """What every block of a stack reads beside the residual stream.

    Attributes:
        self_bias: <float>[B or 1, H, L, keys] positions and masks of self-attention.
        token_mask: <bool>[B, L] tokens that may be routed.
        memory: <float>[B, M, D] encoder output, in a decoder.
        memory_bias: <float>[B, 1, L or 1, M] mask of cross-attention; None when nothing is masked.
        cache: Keys and values of earlier steps.
        drop_tokens: Whether experts have a capacity.
        report: Whether sparse layers say what their routers did.
        token_ids: <int64>[B, L] vocabulary ids, when the caller has them.
        word_embeddings: <float>[B, L, D] what the stack started from.
    """

    self_bias: Tensor
    token_mask: Tensor
    memory: Tensor | None
    memory_bias: Tensor | None
    cache: EncoderDecoderCache | None
    drop_tokens: bool
    report: bool
    token_ids: Tensor | None
    word_embeddings: Tensor


class Block(GradientCheckpointingLayer):
    """Self-attention, cross-attention in a decoder, then a dense or sparse feed-forward layer, all pre-norm.

    Source:
        ST-MoE (arXiv:2202.08906) §3.1 and appendix C (a dense layer after each sparse one). Differs: no.
    """

    def __init__(self, config: STMoEConfig, layer: int, *, decoder: bool) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.dropout_rate)
        self.self_attention_norm = RMSNorm(config)
        self.self_attention = Attention(config, layer=layer, cross=False)
        if decoder:
            self.cross_attention_norm = RMSNorm(config)
            self.cross_attention = Attention(config, layer=layer, cross=True)
        self.sparse = config.is_sparse_block(layer, decoder=decoder)
        self.stacked = self.sparse and config.sparse_dense_stacking
        if self.sparse:
            self.sparse_norm = RMSNorm(config)
            self.sparse_feed_forward = SparseFeedForward(config.sparse_config(decoder=decoder))
        if not self.sparse or self.stacked:
            self.feed_forward_norm = RMSNorm(config)
            self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, RouterOutput | None]:
        """Returns the residual stream <float>[B, L, D] after the block, and what its router did if it is sparse."""
        router = None
        y = self.self_attention(self.self_attention_norm(x), context.self_bias, cache=context.cache)
        x = x + self.dropout(y)
        if context.memory is not None:
            y = self.cross_attention(self.cross_attention_norm(x), context.memory_bias, context.memory, context.cache)
            x = x + self.dropout(y)
        if self.sparse:
            y, router = self.sparse_feed_forward(
                self.sparse_norm(x),
                context.token_mask,
                token_ids=context.token_ids,
                word_embeddings=context.word_embeddings,
                drop_tokens=context.drop_tokens,
                report=context.report,
            )
            x = x + self.dropout(y)
        if not self.sparse or self.stacked:
            x = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return x, router


class Stack(nn.Module):
    """Encoder or decoder: blocks over embedded tokens, one relative position bias, a final norm."""

    def __init__(self, config: STMoEConfig, *, decoder: bool) -> None:
        super().__init__()
        self.decoder = decoder
        num_layers = config.num_decoder_layers if decoder else config.num_layers
        assert num_layers is not None, "the config fills num_decoder_layers"
        self.position_bias = RelativePositionBias(config, decoder=decoder)
        self.blocks = nn.ModuleList(Block(config, layer, decoder=decoder) for layer in range(num_layers))
        self.final_norm = RMSNorm(config)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.tp: ProcessGroup | None = None  # ranks that see the same tokens

    def forward(
        self,
        x: Tensor,
        *,
        token_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        routing_mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        memory_segment_ids: Tensor | None = None,
        cache: EncoderDecoderCache | None = None,
        drop_tokens: bool = True,
        report: bool = True,
    ) -> tuple[Tensor, tuple[RouterOutput, ...]]:
        """Returns the last hidden states and what each sparse layer's router did.

        Args:
            x: <float>[B, L, D] embedded tokens.
            token_ids: <int64>[B, L] vocabulary ids of them; None when the caller has embeddings only.
            attention_mask: <int64 or bool>[B, keys] tokens that may be attended to; with a cache, its tokens too.
            segment_ids: <int64>[B, L] example of each token, 0 for padding; tokens see only their own example.
            routing_mask: <bool>[B, L] tokens that may be routed; None for those of `attention_mask`.
            memory: <float>[B, M, D] encoder output, in a decoder.
            memory_mask: <int64 or bool>[B, M] real tokens of the memory.
            memory_segment_ids: <int64>[B, M] segments of the memory.
            cache: Keys and values of earlier steps; extended.
            drop_tokens: Whether experts have a capacity.
            report: Whether sparse layers say what their routers did.

        Returns:
            <float>[B, L, D], and one RouterOutput for each sparse layer that reports.
        """
        past = cache.get_seq_length() if cache is not None else 0
        length = x.shape[1]
        if attention_mask is None and segment_ids is not None:
            attention_mask = segment_ids != 0
        if routing_mask is None:
            routing_mask = _last(attention_mask, length) if attention_mask is not None else None
        if routing_mask is None:
            routing_mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)

        allowed = _combine(
            _visible(attention_mask),
            _same_segment(segment_ids, segment_ids),
            _causal(length, past, x.device) if self.decoder else None,
        )
        memory_allowed = _combine(_visible(memory_mask), _same_segment(segment_ids, memory_segment_ids))
        context = Context(
            self_bias=mask_bias(self.position_bias(length, past + length, past).to(x.dtype), allowed),
            token_mask=routing_mask.bool(),
            memory=None if memory is None else enter_shards(memory, self.tp),
            memory_bias=None if memory_allowed is None else mask_bias(x.new_zeros(1, 1, 1, 1), memory_allowed),
            cache=cache,
            drop_tokens=drop_tokens,
            report=report,
            token_ids=token_ids,
            word_embeddings=x,
        )

        x = self.dropout(x)
        routers = []
        for block in self.blocks:
            x, router = block(x, context)
            if router is not None:
                routers.append(router)
        return self.dropout(self.final_norm(x)), tuple(routers)


def _last(mask: Tensor, length: int) -> Tensor:
    """Returns the mask of the last `length` tokens <any>[B, length]; earlier ones are in the cache."""
    return mask[:, mask.shape[1] - length :]


def _visible(mask: Tensor | None) -> Tensor | None:
    """Returns <bool>[B, 1, 1, keys] of <int64 or bool>[B, keys]; None when all are visible."""
    return None if mask is None else mask.bool()[:, None, None, :]


def _same_segment(queries: Tensor | None, keys: Tensor | None) -> Tensor | None:
    """Returns <bool>[B, 1, L, keys]: whether query and key are of one example; None without segments."""
    if queries is None or keys is None:
        return None
    return (queries[:, :, None] == keys[:, None, :])[:, None]


def _causal(length: int, past: int, device: torch.device) -> Tensor | None:
    """Returns <bool>[1, 1, L, past + L]: whether a key is not after its query; None for a single query."""
    if length == 1:
        return None
    keys = torch.arange(past + length, device=device)
    return (keys[None, :] <= keys[past:, None])[None, None]


def _combine(*masks: Tensor | None) -> Tensor | None:
    """Returns the conjunction of the masks that are there; None when there is none."""
    present = [mask for mask in masks if mask is not None]
    if not present:
        return None
    combined = present[0]
    for mask in present[1:]:
        combined = combined & mask
    return combined
