"""Attention of T5: root-mean-square norm, relative position bias, multi-head attention with a
cache.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moe.distributed.collectives import copy_to_tp_region, reduce_from_tp_region
from moe.distributed.sharding import local_shard
from moe.kernels.cpu_matmul import linear
from moe.models.configuration import STMoEConfig
from moe.sparse.experts import truncated_normal_


class Projection(nn.Linear):
    """A linear map without bias that draws its own weights, normal with a given deviation.

    Its initialisation belongs to the leaf because transformers initialises what a checkpoint lacks
    leaf by leaf.
    """

    def __init__(self, d_in: int, d_out: int, *, std: float, truncated: bool = False) -> None:
        self.std, self.truncated = std, truncated
        super().__init__(d_in, d_out, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Returns <float>[..., d_out of this rank] of <float>[..., d_in of this rank]."""
        return linear(
            input, local_shard(self.weight).flatten(0, -2)
        )  # packed for a mesh: [2, F, D]

    def reset_parameters(self) -> None:
        """Draws the weights anew; `truncated` cuts the normal at two deviations."""
        if self.truncated:
            truncated_normal_(self.weight, self.std)
        else:
            nn.init.normal_(self.weight, std=self.std)


class RMSNorm(nn.Module):
    """Divides by the root mean square over D, in float32, then scales; no mean, no bias.

    Source:
        ST-MoE (arXiv:2202.08906) §3.1. Differs: no.
    """

    def __init__(self, config: STMoEConfig) -> None:
        super().__init__()
        self.eps = config.layer_norm_epsilon
        self.weight = nn.Parameter(torch.empty(config.d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the scale to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Returns <dtype of x>[B, L, D] of <any float>[B, L, D]."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.eps).to(x.dtype)


class RelativePositionBias(nn.Module):
    """A learned number for each head and bucket of distances; one table serves all self-attention
    of a stack.
    """

    def __init__(self, config: STMoEConfig, *, decoder: bool) -> None:
        super().__init__()
        self.config = config
        self.decoder = decoder
        self.table = nn.Parameter(
            torch.empty(config.relative_attention_num_buckets, config.num_heads)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the table anew: uniform with variance scale / mean of both sizes (flaxformer,
        fan_avg).
        """
        limit = math.sqrt(3 * self.config.initializer_scale / (sum(self.table.shape) / 2))
        nn.init.uniform_(self.table, -limit, limit)

    def forward(self, queries: Tensor, num_keys: int) -> Tensor:
        """Returns the bias <float>[1, H, L, num_keys] of queries at the positions <int64>[L]."""
        distance = torch.arange(num_keys, device=queries.device)[None, :] - queries[:, None]
        buckets = relative_position_bucket(
            distance,
            bidirectional=not self.decoder,
            num_buckets=self.config.relative_attention_num_buckets,
            max_distance=self.config.relative_attention_max_distance,
        )
        return rearrange(F.embedding(buckets, local_shard(self.table)), "q k h -> 1 h q k")


def relative_position_bucket(
    distance: Tensor, *, bidirectional: bool, num_buckets: int, max_distance: int
) -> Tensor:
    """Returns the bucket of each distance: exact when near, logarithmic when far, one for all
    beyond `max_distance`.

    Args:
        distance: <int64>[...] key position minus query position.
        bidirectional: Whether keys after the query have buckets of their own (half of them).
        num_buckets: Buckets in all.
        max_distance: Distance in tokens from which the last bucket is used.

    Returns:
        <int64>[...] in [0, num_buckets).

    Source:
        T5 (arXiv:1910.10683) §2.1; Mesh-TensorFlow transformer_layers.py at 0cb87fe. Differs: no.
    """
    offset = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        offset = (distance > 0) * num_buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    num_exact = num_buckets // 2
    growth = torch.log(distance.clamp(min=1).float() / num_exact) / math.log(
        max_distance / num_exact
    )
    far = (num_exact + (growth * (num_buckets - num_exact)).long()).clamp(max=num_buckets - 1)
    return offset + torch.where(distance < num_exact, distance, far)


class Attention(nn.Module):
    """Multi-head attention without biases and without 1/√d at run time: the query's initialisation
    holds it.

    Where a position bias is trained on a CPU, torch's `sdpa` runs no fused kernel: `eager` is then
    as fast in float32 and two to three times as fast in bfloat16.
    """

    def __init__(self, config: STMoEConfig, *, layer: int, cross: bool) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.cross = cross
        self.d_kv, self.dropout_rate = config.d_kv, config.dropout_rate
        width, scale = config.num_heads * config.d_kv, config.initializer_scale
        std = math.sqrt(scale / config.d_model)
        self.q_proj = Projection(config.d_model, width, std=std / math.sqrt(config.d_kv))
        self.k_proj = Projection(config.d_model, width, std=std)
        self.v_proj = Projection(config.d_model, width, std=std)
        self.o_proj = Projection(width, config.d_model, std=math.sqrt(scale / width))
        self.tp: ProcessGroup | None = None  # ranks that hold the other heads

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None,
        memory: Tensor | None = None,
        cache: EncoderDecoderCache | None = None,
        *,
        output_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns what each token gathers, and the weights with which it does.

        Args:
            x: <float>[B, L, D] queries, and keys and values of self-attention.
            bias: <float>[B or 1, H or 1, L, keys] for the heads of this rank, added to the scores;
                holds positions and masks. None for nothing.
            memory: <float>[B, M, D] encoder output; cross-attention only.
            cache: Keys and values of earlier steps, extended by this call.
            output_weights: Whether weights are wanted; fused attention has none, so that this call
                is then eager.

        Returns:
            <float>[B, L, D], and <float>[B, H, L, keys] or None.
        """
        x = copy_to_tp_region(x, self.tp)
        query = self._split_heads(self.q_proj(x))
        key, value = self._keys_and_values(x if memory is None else memory, cache)
        kind = "eager" if output_weights else self.config._attn_implementation or "eager"
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(kind, eager_attention)
        dropout = self.dropout_rate if self.training else 0.0
        y, weights = attend(
            self, query, key, value, bias, dropout=dropout, scaling=1.0, is_causal=False
        )
        y = reduce_from_tp_region(self.o_proj(y.flatten(2)), self.tp)
        return y, weights if output_weights else None

    def _keys_and_values(
        self, source: Tensor, cache: EncoderDecoderCache | None
    ) -> tuple[Tensor, Tensor]:
        """Returns keys and values <float>[B, H, keys, d_kv], through the cache if there is one."""
        if cache is not None and self.cross and cache.is_updated.get(self.layer):
            layer: Any = cache.cross_attention_cache.layers[self.layer]
            return layer.keys[:, :, : source.shape[1]], layer.values[:, :, : source.shape[1]]
        key, value = self._split_heads(self.k_proj(source)), self._split_heads(self.v_proj(source))
        if cache is None:
            return key, value
        if not self.cross:
            return cache.self_attention_cache.update(key, value, self.layer)
        cache.is_updated[self.layer] = True
        cache.cross_attention_cache.update(key, value, self.layer)
        return key, value

    def _split_heads(self, x: Tensor) -> Tensor:
        """Returns <float>[B, H, L, d_kv] of <float>[B, L, H * d_kv]; a pattern of einops costs a
        decoding step 10 %.
        """
        return x.unflatten(-1, (-1, self.d_kv)).transpose(1, 2)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float,
    scaling: float,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Returns attention output <float>[B, L, H, d_kv] and weights <float>[B, H, L, keys], step by
    step.

    The signature is that of transformers' attention functions.
    """
    scores = (query @ key.transpose(-1, -2) * scaling).to(
        torch.promote_types(query.dtype, torch.float32)
    )
    if attention_mask is not None:
        scores = (
            scores + attention_mask
        )  # in float16 the sum would be -inf, and NaN where all keys are masked
    weights = scores.softmax(dim=-1).to(value.dtype)
    weights = F.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


def mask_bias(bias: Tensor, allowed: Tensor | None) -> Tensor:
    """Returns the bias <float>[.., L, keys] with the lowest number where <bool>[.., L, keys]
    forbids attention.
    """
    return bias if allowed is None else bias.masked_fill(~allowed, torch.finfo(bias.dtype).min)
