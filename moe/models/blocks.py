"""Blocks and stacks: attention, dense and sparse feed-forward layers around a residual stream."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer

from moe.distributed.collectives import copy_to_tp_region, reduce_from_tp_region
from moe.distributed.random_numbers import tp_random_numbers
from moe.kernels.dropout import Dropout
from moe.kernels.hidden_units import ExpertForm, hidden_units
from moe.models.attention import (
    Attention,
    Positions,
    Projection,
    RelativePositionBias,
    RMSNorm,
    mask_bias,
)
from moe.models.configuration import STMoEConfig
from moe.models.inputs import check_segments, real_tokens
from moe.models.prefixes import decoder_prefixes, find_prefixes
from moe.sparse.config import SparseConfig
from moe.sparse.layer import RouterOutput, SparseFeedForward


class FeedForward(nn.Module):
    """The dense feed-forward layer: GEGLU with tanh GELU, SwiGLU, or ReLU; no biases."""

    def __init__(self, config: STMoEConfig) -> None:
        super().__init__()
        self.dropout_rate = config.dropout_rate
        self.gated = config.gated
        self.activation = config.activation

        # The gate and the projection that it multiplies are one matrix, the gate first.
        num_inputs = 2 if self.gated else 1
        std_up = math.sqrt(config.initializer_scale / config.d_model)
        std_down = math.sqrt(config.initializer_scale / config.d_ff)
        self.up_proj = Projection(
            config.d_model, num_inputs * config.d_ff, std=std_up, truncated=True
        )
        self.down_proj = Projection(config.d_ff, config.d_model, std=std_down, truncated=True)

        # Ranks that hold the other hidden units.
        self.tp: ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Returns <float>[B, L, D] of <float>[B, L, D]."""
        hidden = self.up_proj(copy_to_tp_region(x, self.tp))  # [B, L, F], or [B, L, 2F] with a gate
        if self.up_proj.weight.dtype == torch.float16:
            hidden = hidden.float()  # the product with the gate, and the next, may overflow

        rate = self.dropout_rate if self.training else 0.0
        form = ExpertForm(self.activation, self.gated, "none", rate)
        with tp_random_numbers(self.tp, x.device, rate):
            hidden = hidden_units(hidden, None, form)  # [B, L, F]
        return reduce_from_tp_region(self.down_proj(hidden), self.tp)  # [B, L, D]


class Context(NamedTuple):
    """Inputs of every block of a stack, in addition to the residual stream.

    Attributes:
        positions: Positions and masks of self-attention.
        self_bias: <float>[B or 1, H, L, keys] their bias; None if each block has its own.
        token_mask: <bool>[B, L] tokens that may be routed.
        memory: <float>[B, M, D] encoder output, in a decoder.
        memory_bias: <float>[B, 1, L or 1, M] mask of cross-attention; None when nothing is masked.
        cache: Keys and values of earlier steps.
        drop_tokens: Whether experts have a capacity.
        report: Whether sparse layers return the records of their routers.
        token_ids: <int64>[B, L] vocabulary ids, if the caller has them.
        word_embeddings: <float>[B, L, D] what the stack started from.
        segment_ids: <int64>[B, L] example of each token, if a sequence has several.
        prefix_numbers: <int64>[B, L] prefix of each token's example, if the model knows any.
        output_attentions: Whether blocks return the weights of their attention.
    """

    positions: Positions
    self_bias: Tensor | None
    token_mask: Tensor
    memory: Tensor | None
    memory_bias: Tensor | None
    cache: EncoderDecoderCache | None
    drop_tokens: bool
    report: bool
    token_ids: Tensor | None
    word_embeddings: Tensor
    segment_ids: Tensor | None
    prefix_numbers: Tensor | None
    output_attentions: bool


class BlockOutput(NamedTuple):
    """Output of a block.

    Attributes:
        hidden: <float>[B, L, D] residual stream after the block.
        router: Record of its router, if it is sparse.
        self_weights: <float>[B, H, L, keys] of self-attention, if requested.
        cross_weights: <float>[B, H, L, M] of cross-attention, if requested and present.
    """

    hidden: Tensor
    router: RouterOutput | None
    self_weights: Tensor | None
    cross_weights: Tensor | None


class StackOutput(NamedTuple):
    """Output of a stack.

    Attributes:
        hidden: <float>[B, L, D] after the last norm.
        routers: One for each sparse layer.
        hidden_states: <float>[B, L, D] before each block, and `hidden`; None unless requested.
        attentions: <float>[B, H, L, keys] of each block's self-attention; None unless requested.
        cross_attentions: <float>[B, H, L, M] of each block's cross-attention; None unless
            requested.
        prefix_numbers: <int64>[B, L] prefix of each token's example; None when the model has no
            experts of one.
    """

    hidden: Tensor
    routers: tuple[RouterOutput, ...]
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None
    cross_attentions: tuple[Tensor, ...] | None
    prefix_numbers: Tensor | None


class Block(GradientCheckpointingLayer):
    """Self-attention, cross-attention in a decoder, then feed-forward layers, all pre-norm.

    Source:
        ST-MoE (arXiv:2202.08906) §3.1 and appendix C (a dense layer after each sparse one).
        Differs: no.
    """

    def __init__(
        self, config: STMoEConfig, layer: int, sparse: SparseConfig | None, *, decoder: bool
    ) -> None:
        super().__init__()
        self.dropout = Dropout(config.dropout_rate)

        self.self_attention_norm = RMSNorm(config)
        self.self_attention = Attention(config, layer=layer, cross=False)
        self.position_bias = None
        if config.relative_bias_in_every_block:
            self.position_bias = RelativePositionBias(config, decoder=decoder)
        if decoder:
            self.cross_attention_norm = RMSNorm(config)
            self.cross_attention = Attention(config, layer=layer, cross=True)

        # A sparse layer replaces the dense one, or precedes it.
        self.sparse = sparse is not None
        self.stacked = self.sparse and config.sparse_dense_stacking
        if sparse is not None:
            self.sparse_norm = RMSNorm(config)
            self.sparse_feed_forward = SparseFeedForward(sparse)
        if not self.sparse or self.stacked:
            self.feed_forward_norm = RMSNorm(config)
            self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, context: Context) -> BlockOutput:
        """Returns the residual stream after the block, for <float>[B, L, D] before it."""
        # Only some blocks return these.
        router = None
        cross_weights = None
        attention: dict[str, Any] = {
            "cache": context.cache,
            "output_weights": context.output_attentions,
        }

        # Each layer reads the normalised residual stream and adds to it. In float16 the stream is
        # wider than attention, whose projections may be those of a quantizer, which keep the dtype.
        dtype = context.positions.dtype
        self_bias = context.self_bias
        if self.position_bias is not None:
            self_bias = self.position_bias(context.positions)
        y = self.self_attention_norm(x).to(dtype)
        y, self_weights = self.self_attention(y, self_bias, **attention)
        x = self._add(x, y)

        # In a decoder: attention to the encoder's output.
        if context.memory is not None:
            y = self.cross_attention_norm(x).to(dtype)
            y, cross_weights = self.cross_attention(
                y, context.memory_bias, context.memory, **attention
            )
            x = self._add(x, y)

        # The sparse layer; appendix C of the paper adds a dense one after it.
        if self.sparse:
            y, router = self.sparse_feed_forward(
                self.sparse_norm(x),
                context.token_mask,
                token_ids=context.token_ids,
                word_embeddings=context.word_embeddings,
                segment_ids=context.segment_ids,
                prefix_numbers=context.prefix_numbers,
                drop_tokens=context.drop_tokens,
                report=context.report,
            )
            x = self._add(x, y)

        if not self.sparse or self.stacked:
            y = self.feed_forward(self.feed_forward_norm(x))
            x = self._add(x, y)

        return BlockOutput(x, router, self_weights, cross_weights)

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the residual stream <float>[B, L, D] plus the output <float>[B, L, D] of a layer."""
        if y.dtype == torch.float16:
            largest = torch.finfo(y.dtype).max
            y = y.clamp(-largest, largest)
        return x + self.dropout(y)


class Stack(nn.Module):
    """Encoder or decoder: blocks over embedded tokens, relative position biases, a final norm.

    Sums of T5's layers exceed float16's largest number. As in transformers, down projections of a
    model that is loaded in float16 stay float32, and with them the residual stream; attention,
    which has no such projection, is clamped.
    """

    def __init__(self, config: STMoEConfig, *, decoder: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.position_bias = None
        if not config.relative_bias_in_every_block:
            self.position_bias = RelativePositionBias(config, decoder=decoder)

        # Sparse layers of a stack may differ in their experts.
        num_layers, _ = config.stack_sizes(decoder)
        sparse_configs = iter(config.sparse_configs(decoder=decoder))
        blocks = []
        for layer in range(num_layers):
            is_sparse = config.is_sparse_block(layer, decoder=decoder)
            sparse = next(sparse_configs) if is_sparse else None
            blocks.append(Block(config, layer, sparse, decoder=decoder))
        self.blocks = nn.ModuleList(blocks)

        self.final_norm = RMSNorm(config)
        self.dropout = Dropout(config.dropout_rate)
        self.prefix_experts = config.prefix_experts

        # Ranks that see the same tokens.
        self.tp: ProcessGroup | None = None

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
        memory_prefixes: Tensor | None = None,
        cache: EncoderDecoderCache | None = None,
        drop_tokens: bool = True,
        report: bool = True,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> StackOutput:
        """Returns the last hidden states, the records of the routers, and other requested outputs.

        Args:
            x: <float>[B, L, D] embedded tokens.
            token_ids: <int64>[B, L] their vocabulary ids; None when the caller has embeddings only.
            attention_mask: <int64 or bool>[B, keys] tokens that may be attended to. With a
                cache, its tokens too; with a static cache, also its positions not filled yet.
            segment_ids: <int64>[B, L] example of each token, 0 for padding; tokens see only their
                own example.
            routing_mask: <bool>[B, L] tokens that may be routed; None uses `attention_mask`.
            memory: <float>[B, M, D] encoder output, in a decoder.
            memory_mask: <int64 or bool>[B, M] real tokens of the memory; None for those with a
                segment.
            memory_segment_ids: <int64>[B, M] segments of the memory.
            memory_prefixes: <int64>[B, M] prefix of each example of the memory; see `find_prefixes`.
            cache: Keys and values of earlier steps; extended.
            drop_tokens: Whether experts have a capacity.
            report: Whether sparse layers return the records of their routers.
            output_attentions: Whether to return the weights of all attention.
            output_hidden_states: Whether to return the residual stream before each block.

        Raises:
            DataError: When a mask or segments have another type, shape or range of values, or the
                prefixes of the memory are missing.
        """
        # Positions of the tokens after the cached ones. The length of a static cache is a tensor.
        batch, length = x.shape[:2]
        past = 0
        num_keys = length
        if cache is not None:
            past = cache.get_seq_length()
            num_keys = cache.get_mask_sizes(length, 0)[0]
        positions = torch.arange(length, device=x.device) + past  # [L]

        # Which tokens may be attended to.
        prefix = "decoder_" if self.decoder else ""
        attention_mask = _token_mask(prefix, attention_mask, segment_ids, (batch, num_keys))
        if memory is not None:
            memory_shape = (memory.shape[0], memory.shape[1])
            memory_mask = _token_mask("", memory_mask, memory_segment_ids, memory_shape)

        # Tokens that may be routed: the real ones of this call.
        if routing_mask is None:
            routing_mask = attention_mask
            if attention_mask is not None and cache is not None:
                routing_mask = attention_mask.index_select(1, positions)  # [B, keys] -> [B, L]
        if routing_mask is None:
            routing_mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)

        # The prefix of each token's example: the encoder reads it, the decoder gets it.
        prefixes = None
        if self.prefix_experts and self.decoder:
            prefixes = decoder_prefixes(memory_prefixes, memory_segment_ids, segment_ids, length)
        elif self.prefix_experts:
            prefixes = find_prefixes(self.prefix_experts, token_ids, routing_mask, segment_ids)

        # Keys visible to each query. One new token sees the whole cache if no position is free.
        causal = None
        fixed_size = cache is not None and cache.is_compileable
        if self.decoder and (length > 1 or fixed_size):
            causal = _causal(positions, num_keys)
        allowed = _all_of(_visible(attention_mask), _same_segment(segment_ids, segment_ids), causal)
        places = Positions(positions, num_keys, allowed, x.dtype)

        # The same for cross-attention, which has no positions.
        memory_allowed = _all_of(
            _visible(memory_mask), _same_segment(segment_ids, memory_segment_ids)
        )
        memory_bias = None
        if memory_allowed is not None:
            memory_bias = mask_bias(x.new_zeros(1, 1, 1, 1), memory_allowed)
        if memory is not None:
            memory = copy_to_tp_region(memory, self.tp)

        # Every block reads the same.
        context = Context(
            positions=places,
            self_bias=None if self.position_bias is None else self.position_bias(places),
            token_mask=routing_mask,
            memory=memory,
            memory_bias=memory_bias,
            cache=cache,
            drop_tokens=drop_tokens,
            report=report,
            token_ids=token_ids,
            word_embeddings=x,
            segment_ids=segment_ids,
            prefix_numbers=prefixes,
            output_attentions=output_attentions,
        )
        return self._run_blocks(x, context, output_hidden_states=output_hidden_states)

    def _run_blocks(
        self, x: Tensor, context: Context, *, output_hidden_states: bool
    ) -> StackOutput:
        """Returns the output of the stack for <float>[B, L, D] embedded tokens."""
        hidden_states: list[Tensor] = []
        routers: list[RouterOutput] = []
        attentions: list[Tensor] = []
        cross_attentions: list[Tensor] = []

        dtype = x.dtype
        x = self.dropout(x)
        if dtype == torch.float16:
            x = x.float()
        for block in self.blocks:
            if output_hidden_states:
                hidden_states.append(x)

            x, router, self_weights, cross_weights = block(x, context)
            if router is not None:
                routers.append(router)
            if context.output_attentions:
                attentions.append(self_weights)
                cross_attentions.append(cross_weights)

        # The last hidden state is the one after the norm.
        x = self.dropout(self.final_norm(x))
        if dtype == torch.float16:
            x = x.to(dtype)
        has_cross_attention = context.memory is not None
        return StackOutput(
            hidden=x,
            routers=tuple(routers),
            hidden_states=(*hidden_states, x) if output_hidden_states else None,
            attentions=tuple(attentions) if context.output_attentions else None,
            cross_attentions=tuple(cross_attentions)
            if context.output_attentions and has_cross_attention
            else None,
            prefix_numbers=context.prefix_numbers,
        )


def _token_mask(
    prefix: str, mask: Tensor | None, segment_ids: Tensor | None, shape: tuple[int, int]
) -> Tensor | None:
    """Returns <bool>[B, keys]: which tokens are real; None when all are.

    Args:
        prefix: Prefix of the arguments' names in messages.
        mask: <int64 or bool>[B, keys] True for real tokens; if None, tokens with a segment are real.
        segment_ids: <int64>[B, keys] example of each token, 0 for padding.
        shape: B and the number of keys.
    """
    check_segments(f"{prefix}segment_ids", segment_ids, shape)
    if mask is None and segment_ids is not None:
        mask = segment_ids != 0
    return real_tokens(f"{prefix}attention_mask", mask, shape)


def _visible(mask: Tensor | None) -> Tensor | None:
    """Returns <bool>[B, 1, 1, keys] of <bool>[B, keys]; None when all are visible."""
    return None if mask is None else mask[:, None, None, :]


def _same_segment(queries: Tensor | None, keys: Tensor | None) -> Tensor | None:
    """Returns <bool>[B, 1, L, keys]: query and key belong to one example; None without segments."""
    if queries is None or keys is None:
        return None
    return (queries[:, :, None] == keys[:, None, :])[:, None]


def _causal(queries: Tensor, num_keys: int) -> Tensor:
    """Returns <bool>[1, 1, L, num_keys]: the key is not after the query at position <int64>[L]."""
    keys = torch.arange(num_keys, device=queries.device)
    return (keys[None, :] <= queries[:, None])[None, None]


def _all_of(*masks: Tensor | None) -> Tensor | None:
    """Returns the conjunction of the masks that are not None; None if all are."""
    conjunction = None
    for mask in masks:
        if mask is None:
            continue
        conjunction = mask if conjunction is None else conjunction & mask
    return conjunction
