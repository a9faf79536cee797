"""What each kind of layer costs in a forward pass: operations, and bytes kept for the backward pass.

One function for each class of module: the planner walks the model and asks for the cost of every
layer. Sizes and structure are the module's own; what stands here is which tensors its kernels keep.
The kernels are those of an accelerator, or, to be held against a count by saved-tensor hooks, those
of a CPU. They differ in three places: the norm of a CPU keeps the normalised input too, its
attention with a learned bias keeps the probabilities, and its experts keep other rows. What a kernel
holds only while it runs is not counted.

Tracing the model under fake tensors was tried and counts less: a router's check of its logits and
the counts of rows depend on data, which a trace does not have; a build of torch without CUDA has no
fake CUDA tensors, so that the trace sees the kernels of a CPU; and a ranking of meshes plans
hundreds of models, each of which takes a second to build alone.
"""

import functools
from typing import NamedTuple

from torch import nn

from moe.models.attention import Attention, Projection, RMSNorm
from moe.models.blocks import Block, FeedForward
from moe.planning.workload import FLOAT32_BYTES, StackPass
from moe.sparse.layer import SparseFeedForward

_INT64_BYTES = 8


class LayerCost(NamedTuple):
    """What a layer costs in one forward pass on one rank.

    Attributes:
        flops: Operations of matrix products and attention, two for each multiply and add.
        saved_bytes: What the graph keeps for the backward pass.
    """

    flops: int
    saved_bytes: int


def block_cost(block: Block, p: StackPass) -> LayerCost:
    """Returns the cost of a block: of its layers, and of the dropout after each but the norms."""
    flops = 0
    saved_bytes = 0
    for layer in block.children():
        if layer is block.dropout:
            continue
        cost = layer_cost(layer, p)
        flops += cost.flops
        saved_bytes += cost.saved_bytes
        if not isinstance(layer, RMSNorm):
            saved_bytes += dropout_mask_bytes(p.num_tokens * p.d_model, block.dropout.p, p)
    return LayerCost(flops, saved_bytes)


@functools.singledispatch
def layer_cost(layer: nn.Module, p: StackPass) -> LayerCost:
    """Returns the cost of one layer of a block; a new kind of layer registers a function.

    Args:
        layer: Child of a block.
        p: The pass that it is part of.
    """
    raise AssertionError(f"no cost is registered for {type(layer).__name__}")


@layer_cost.register
def norm_cost(layer: RMSNorm, p: StackPass) -> LayerCost:
    """Returns the cost of a norm; it keeps its input, which the residual stream does not."""
    inputs = p.num_tokens * p.d_model * FLOAT32_BYTES
    inverse_rms = p.num_tokens * FLOAT32_BYTES
    normalised = inputs if p.cpu else 0
    return LayerCost(0, inputs + inverse_rms + normalised)


@layer_cost.register
def attention_cost(layer: Attention, p: StackPass) -> LayerCost:
    """Returns the cost of self-attention, or of attention to the memory."""
    source = p.memory if layer.cross else p
    assert source is not None, "only a decoder has cross-attention"
    D = p.d_model
    A = layer.q_proj.out_features // p.tp  # heads x d_kv of this rank
    H = A // layer.d_kv
    queries = p.num_tokens
    keys = source.num_tokens

    # Products: query and output, key and value; then scores and weighted sums.
    flops = 4 * (queries + keys) * D * A + 4 * queries * source.length * A

    # Inputs: one for all three products, and the memory once for all blocks; with casts a copy for
    # each product.
    saved_bytes = queries * D * FLOAT32_BYTES
    if p.casts_inputs:
        saved_bytes = (queries + 2 * keys) * D * p.product_bytes

    # Query and output, key and value.
    saved_bytes += 2 * (queries + keys) * A * p.product_bytes

    # A CPU has a fused kernel only without learned bias and dropout; else it keeps probabilities,
    # those before dropout and its mask, and works in float32.
    has_dropout = layer.dropout_rate > 0
    if p.cpu and (has_dropout or not layer.cross):
        scores = H * queries * source.length * (3 if has_dropout else 1)
        casts = (queries + 2 * keys) * A * (FLOAT32_BYTES - p.product_bytes)
        return LayerCost(flops, saved_bytes + scores * FLOAT32_BYTES + casts)

    # A fused kernel keeps the logsumexp of the scores, and a cast copy of the bias.
    saved_bytes += H * queries * FLOAT32_BYTES
    if p.casts_inputs and layer.cross:
        saved_bytes += queries * source.length * p.masked * p.product_bytes
    elif p.casts_inputs:
        saved_bytes += position_bias_elements(H, p) * p.product_bytes
    return LayerCost(flops, saved_bytes)


def position_bias_elements(num_heads: int, p: StackPass) -> int:
    """Returns the numbers in the bias of self-attention, masks added."""
    num_biases = p.num_rows if p.masked else 1
    return num_biases * num_heads * p.length * p.length


@layer_cost.register
def feed_forward_cost(layer: FeedForward, p: StackPass) -> LayerCost:
    """Returns the cost of a dense feed-forward layer."""
    tokens = p.num_tokens
    D = p.d_model
    F = layer.down_proj.in_features // p.tp
    num_products = 3 if layer.gated else 2
    flops = 2 * num_products * tokens * D * F

    # Gated: gate, up, GELU of the gate, and their product; else ReLU's result.
    num_hidden = 4 if layer.gated else 1
    saved_bytes = tokens * (D + num_hidden * F) * p.product_bytes
    saved_bytes += dropout_mask_bytes(tokens * F, layer.dropout_rate, p)
    return LayerCost(flops, saved_bytes)


@layer_cost.register
def sparse_cost(layer: SparseFeedForward, p: StackPass) -> LayerCost:
    """Returns the cost of a sparse layer: its router, its dispatch and its experts."""
    config = layer.config
    tokens = p.num_tokens
    rows = p.expert_rows
    D = p.d_model
    F = config.d_ff // p.tp
    num_products = 3 if config.gated else 2
    gate_products = tokens * layer.router.num_parameters(config)
    flops = 2 * (gate_products + num_products * rows * D * F)

    # Router: its input with padding masked; logits and probabilities; three numbers of a token;
    # expert, gate value, combine weight and acceptance of a choice.
    choice_bytes = _INT64_BYTES + 2 * FLOAT32_BYTES + 1
    saved_bytes = tokens * D * FLOAT32_BYTES
    saved_bytes += tokens * (2 * config.num_experts + 3) * FLOAT32_BYTES
    saved_bytes += tokens * p.num_choices * choice_bytes

    # Dispatch: token and weight of each row; with fixed slots the slot of each choice too.
    saved_bytes += rows * (_INT64_BYTES + FLOAT32_BYTES)
    if config.dispatch == "static":
        saved_bytes += tokens * p.num_choices * _INT64_BYTES

    saved_bytes += _expert_elements(layer, p) * p.product_bytes
    saved_bytes += dropout_mask_bytes(rows * F, config.expert_dropout_rate, p)
    return LayerCost(flops, saved_bytes)


def _expert_elements(layer: SparseFeedForward, p: StackPass) -> int:
    """Returns the numbers in the dtype of products that dispatch, experts and combine keep."""
    config = layer.config
    D = p.d_model
    F = config.d_ff // p.tp

    # Gated: gate, up, GELU of the gate, and their product; else ReLU's result.
    num_hidden = 4 if config.gated else 1
    hidden = p.expert_rows * num_hidden * F
    if config.dispatch == "static":
        return p.expert_rows * 3 * D + hidden

    # Experts on a CPU compute the product again, and read tokens where they are.
    if p.cpu and config.gated:
        hidden = p.expert_rows * 3 * F
    reads_in_place = p.cpu and not p.expert_parallel
    inputs = p.num_tokens if reads_in_place else p.expert_rows
    return (inputs + p.expert_rows) * D + hidden


def head_cost(head: Projection, p: StackPass) -> LayerCost:
    """Returns the cost of the head and the loss on a decoder's last states."""
    tokens = p.num_tokens
    vocab_size = head.out_features
    flops = 2 * tokens * p.d_model * vocab_size

    # Last states, logits and log-probabilities; label, mask and loss of each token.
    saved_bytes = tokens * p.d_model * p.product_bytes
    saved_bytes += tokens * 2 * vocab_size * FLOAT32_BYTES
    saved_bytes += tokens * (_INT64_BYTES + 1 + FLOAT32_BYTES)
    return LayerCost(flops, saved_bytes)


def dropout_mask_bytes(
    num_elements: int, rate: float, p: StackPass, *, in_float32: bool = False
) -> int:
    """Returns the bytes of dropout's mask over so many numbers.

    Args:
        num_elements: Numbers that dropout sees.
        rate: 0 keeps no mask.
        p: The pass; the mask of a CPU has the dtype of the numbers, that of an accelerator a byte.
        in_float32: Whether the numbers are float32 whatever the precision.
    """
    if not rate:
        return 0
    if not p.cpu:
        return num_elements
    return num_elements * (FLOAT32_BYTES if in_float32 else p.product_bytes)
