"""T5's attention: root-mean-square norm, relative position bias, multi-head attention with a cache.

`blocks.py` puts these layers around the residual stream.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moe.distributed.collectives import copy_to_tp_region, reduce_from_tp_region
from moe.distributed.random_numbers import tp_random_numbers
from moe.distributed.sharding import local_shard
from moe.kernels.cpu_matmul import linear
from moe.kernels.dropout import dropout as drop
from moe.models.configuration import STMoEConfig
from moe.models.transformers_private import attention_implementation
from moe.sparse.experts import truncated_normal_


class Projection(nn.Linear):
    """A linear map without bias that initializes its weights from a normal distribution of a given
    deviation.

    Its initialisation belongs to the leaf because transformers initialises missing weights leaf by
    leaf.
    """

    def __init__(self, d_in: int, d_out: int, *, std: float, truncated: bool = False) -> None:
        # Before the constructor of nn.Linear, which calls reset_parameters.
        self.std = std
        self.truncated = truncated
        super().__init__(d_in, d_out, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Returns <float>[..., d_out of this rank] from <float>[..., d_in of this rank]."""
        # On a mesh the gate and the up projection of a gated layer are packed as [2, F, D].
        weight = local_shard(self.weight)
        weight = weight.flatten(0, 1) if weight.dim() == 3 else weight  # [d_out, d_in]
        if weight.dtype == torch.float16:  # the residual stream is wider, see Stack
            input = input.to(weight.dtype)
        return linear(input, weight)

    def reset_parameters(self) -> None:
        """Re-initializes the weights; `truncated` bounds them at two deviations."""
        # On the meta device, where models are loaded and planned, there is nothing to draw; torch
        # would take more than half of the time to find out.
        if self.weight.is_meta:
            return
        if self.truncated:
            truncated_normal_(self.weight, self.std)
        else:
            nn.init.normal_(self.weight, std=self.std)


@contextmanager
def plain_projections() -> Iterator[None]:
    """Makes the projections of models that are built in this context plain `nn.Linear` modules until it ends.

    bitsandbytes replaces modules of that exact type. What it leaves becomes a Projection again.
    """
    projections: list[Projection] = []

    def make_plain(_parent: nn.Module, _name: str, child: nn.Module | None) -> None:
        if type(child) is Projection:
            child.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]
            projections.append(child)

    hook = register_module_module_registration_hook(make_plain)
    try:
        yield
    finally:
        hook.remove()
        for projection in projections:
            projection.__class__ = Projection


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
        scale = self.weight.to(wide.dtype)
        return F.rms_norm(wide, scale.shape, scale, self.eps).to(x.dtype)


class Positions(NamedTuple):
    """Positions of self-attention, and which of them see each other.

    Attributes:
        queries: <int64>[L] positions of the queries.
        num_keys: Keys, at the positions from 0.
        allowed: <bool>[B or 1, 1, L or 1, num_keys] keys that each query may attend to; None for all.
        dtype: Dtype of the bias.
    """

    queries: Tensor
    num_keys: int
    allowed: Tensor | None
    dtype: torch.dtype


class RelativePositionBias(nn.Module):
    """A learned number for each head and bucket of distances.

    One table serves the self-attention of all blocks of a stack, or of one block.
    """

    def __init__(self, config: STMoEConfig, *, decoder: bool) -> None:
        super().__init__()
        self.config = config
        self.decoder = decoder
        num_buckets = config.relative_attention_num_buckets
        self.table = nn.Parameter(torch.empty(num_buckets, config.num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initializes the table: uniform with variance s / fan_avg, as flaxformer does."""
        fan_avg = sum(self.table.shape) / 2
        limit = math.sqrt(3 * self.config.initializer_scale / fan_avg)
        nn.init.uniform_(self.table, -limit, limit)

    def forward(self, positions: Positions) -> Tensor:
        """Returns the bias with its mask, <float>[B or 1, H, L, num_keys]."""
        keys = torch.arange(positions.num_keys, device=positions.queries.device)
        distance = keys[None, :] - positions.queries[:, None]  # [L, num_keys]

        buckets = relative_position_bucket(
            distance,
            bidirectional=not self.decoder,
            num_buckets=self.config.relative_attention_num_buckets,
            max_distance=self.config.relative_attention_max_distance,
        )
        bias = F.embedding(buckets, local_shard(self.table))  # [L, num_keys, H]
        bias = rearrange(bias, "query key head -> 1 head query key").to(positions.dtype)
        return mask_bias(bias, positions.allowed)


def relative_position_bucket(
    distance: Tensor, *, bidirectional: bool, num_buckets: int, max_distance: int
) -> Tensor:
    """Returns the bucket of each distance: exact when near, logarithmic when far.

    Args:
        distance: <int64>[...] key position minus query position.
        bidirectional: Whether keys after the query have their own buckets (half of them).
        num_buckets: Buckets in all.
        max_distance: Distance in tokens from which on all share the last bucket.

    Returns:
        <int64>[...] in [0, num_buckets).

    Source:
        T5 (arXiv:1910.10683) §2.1; Mesh-TensorFlow transformer_layers.py at 0cb87fe. Differs: no.
    """
    # An encoder spends half of its buckets on keys after the query. A decoder sees no such key.
    offset = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        offset = (distance > 0) * num_buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)

    # The nearest half of the buckets holds one distance each.
    num_exact = num_buckets // 2

    # The other half grows logarithmically up to max_distance; the last one holds all larger
    # distances.
    log_distance = torch.log(distance.clamp(min=1).float() / num_exact)
    growth = log_distance / math.log(max_distance / num_exact)  # 0 at num_exact, 1 at max_distance
    far = num_exact + (growth * (num_buckets - num_exact)).long()
    far = far.clamp(max=num_buckets - 1)

    return offset + torch.where(distance < num_exact, distance, far)


class Attention(nn.Module):
    """Multi-head attention without biases, and without 1/√d_kv at run time.

    The initialisation of the query contains that factor. When a position bias is trained on a CPU,
    torch's `sdpa` runs no fused kernel: `eager` is then as fast in float32 and two to three times
    as fast in bfloat16. With dropout on a CPU, attention is always `eager`, which draws random
    numbers faster; and for a single query in bfloat16, for which `sdpa` copies all keys and takes
    4 to 7 times as long (8 sequences, 128 and 512 keys).
    """

    def __init__(self, config: STMoEConfig, *, layer: int, cross: bool) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.cross = cross
        self.d_kv = config.d_kv
        self.dropout_rate = config.dropout_rate

        # Variances s / fan_in; the query's includes the 1 / d_kv of the scores.
        width = config.num_heads * config.d_kv
        std_in = math.sqrt(config.initializer_scale / config.d_model)
        std_out = math.sqrt(config.initializer_scale / width)
        self.q_proj = Projection(config.d_model, width, std=std_in / math.sqrt(config.d_kv))
        self.k_proj = Projection(config.d_model, width, std=std_in)
        self.v_proj = Projection(config.d_model, width, std=std_in)
        self.o_proj = Projection(width, config.d_model, std=std_out)

        # Ranks that hold the other heads.
        self.tp: ProcessGroup | None = None

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None,
        memory: Tensor | None = None,
        cache: EncoderDecoderCache | None = None,
        *,
        output_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the attended values of each token, and the attention weights.

        Args:
            x: <float>[B, L, D] source of the queries, and of keys and values in self-attention.
            bias: <float>[B or 1, H or 1, L, keys] added to the scores of this rank's heads: relative
                positions and masks. None for nothing.
            memory: <float>[B, M, D] encoder output; cross-attention only.
            cache: Keys and values of earlier steps, extended by this call.
            output_weights: Whether to return the weights. Fused attention does not compute them,
                so this call is then eager.

        Returns:
            <float>[B, L, D], and <float>[B, H, L, keys] or None.
        """
        x = copy_to_tp_region(x, self.tp)

        # Each rank of the tensor-parallel group has some of the heads.
        query = self._split_heads(self.q_proj(x))  # [B, H, L, d_kv]
        source = x if memory is None else memory
        key, value = self._keys_and_values(source, cache)  # [B, H, keys, d_kv]

        # transformers' registry has sdpa and users' own functions; eager is ours.
        implementation = attention_implementation(self.config)
        dropout = self.dropout_rate if self.training else 0.0
        is_slow = dropout > 0 or (query.dtype.itemsize == 2 and x.shape[1] == 1)
        is_slow_on_cpu = is_slow and x.device.type == "cpu" and implementation == "sdpa"
        if output_weights or is_slow_on_cpu:
            implementation = "eager"
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        with tp_random_numbers(self.tp, x.device, dropout):
            heads, weights = attend(
                self, query, key, value, bias, dropout=dropout, scaling=1.0, is_causal=False
            )

        # The output projection sums over the heads of all ranks.
        y = self.o_proj(heads.flatten(2))  # [B, L, H, d_kv] -> [B, L, D]
        y = reduce_from_tp_region(y, self.tp)
        return y, weights if output_weights else None

    def _keys_and_values(
        self, source: Tensor, cache: EncoderDecoderCache | None
    ) -> tuple[Tensor, Tensor]:
        """Returns keys and values <float>[B, H, keys, d_kv] of <float>[B, keys, D]."""
        # The keys of the encoder's output are computed at the first step and read from then on.
        if cache is not None and self.cross and cache.is_updated.get(self.layer):
            cached: Any = cache.cross_attention_cache.layers[self.layer]
            num_keys = source.shape[1]
            return cached.keys[:, :, :num_keys], cached.values[:, :, :num_keys]

        key = self._split_heads(self.k_proj(source))
        value = self._split_heads(self.v_proj(source))
        if cache is None:
            return key, value

        # Self-attention sees the keys of all steps so far.
        if not self.cross:
            return cache.self_attention_cache.update(key, value, self.layer)

        # The first step with a cache fills it for the steps that follow.
        cache.is_updated[self.layer] = True
        cache.cross_attention_cache.update(key, value, self.layer)
        return key, value

    def _split_heads(self, x: Tensor) -> Tensor:
        """Returns <float>[B, H, L, d_kv] of <float>[B, L, H * d_kv]."""
        # A pattern of einops costs a decoding step 10 %.
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
    """Returns the output of attention <float>[B, L, H, d_kv] and weights <float>[B, H, L, keys].

    The signature is that of transformers' attention functions.

    Args:
        module: Determines whether this is training.
        query: <float>[B, H, L, d_kv].
        key: <float>[B, H, keys, d_kv].
        value: <float>[B, H, keys, d_kv].
        attention_mask: <float>[B or 1, H or 1, L, keys] added to the scores.
        dropout: Share of the weights that is dropped in training.
        scaling: Factor of the scores.
    """
    # In float16 the sum with a mask would be -inf, and NaN when all keys are masked.
    scores = query @ key.transpose(-1, -2) * scaling  # [B, H, L, keys]
    scores = scores.to(torch.promote_types(query.dtype, torch.float32))
    if attention_mask is not None:
        scores = scores + attention_mask

    weights = scores.softmax(dim=-1).to(value.dtype)
    weights = drop(weights, dropout, training=module.training)
    heads = weights @ value  # [B, H, L, d_kv]
    return heads.transpose(1, 2), weights


def mask_bias(bias: Tensor, allowed: Tensor | None) -> Tensor:
    """Returns a bias <float>[.., L, keys] with the lowest number where attention is not allowed.

    Args:
        bias: <float>[.., L, keys] added to the scores.
        allowed: <bool>[.., L, keys] keys that each query may attend to; None for all.
    """
    if allowed is None:
        return bias
    return bias.masked_fill(~allowed, torch.finfo(bias.dtype).min)
