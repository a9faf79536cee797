"""Costs of each kind of layer in a forward pass: operations, and bytes kept for the backward pass.

One function for each class of module: the planner walks the model and adds up the cost of every
layer. Sizes and structure are the module's own; the functions here know which tensors its kernels
keep. It counts the kernels of an accelerator or of a CPU; tests compare the latter with saved-tensor hooks. They differ
in three places: on a CPU the norm keeps the normalised input too, attention with a learned bias keeps the
probabilities, and experts keep other rows. Memory that a kernel holds only while it runs is not counted.

Tracing the model under fake tensors instead was tried and cannot serve. A router's check of its
logits and the counts of rows depend on data, which a trace does not have (torch 2.13 raises
DataDependentOutputException). A build of torch without CUDA has no fake CUDA tensors, so that a
trace would see the kernels of a CPU. And a ranking of meshes makes hundreds of plans, each of which
would need its own trace.
"""

import functools
from typing import NamedTuple

from torch import nn

from moe.distributed.mesh import MeshConfig
from moe.models.attention import Attention, Projection, RelativePositionBias, RMSNorm
from moe.models.blocks import Block, FeedForward
from moe.models.modeling import STMoEForConditionalGeneration
from moe.planning.workload import FLOAT32_BYTES, StackPass, Workload, pass_counts, stack_passes
from moe.sparse.layer import SparseFeedForward

_INT64_BYTES = 8


class LayerCost(NamedTuple):
    """Cost of a layer in one forward pass on one rank.

    Attributes:
        flops: Operations of matrix products and attention, two for each multiply and add.
        saved_bytes: Bytes that the graph keeps for the backward pass.
    """

    flops: int
    saved_bytes: int


def forward_flops(model: STMoEForConditionalGeneration, workload: Workload) -> int:
    """Returns the operations of a forward pass over one update, of all ranks together.

    Products with weights and attention over the whole length are counted, elementwise operations
    are not. A token uses as many experts as have free slots for it: `StackPass.expert_rows`. A
    backward pass has twice as many.
    """
    one_rank = MeshConfig()
    encoder, decoder = stack_passes(model, workload, one_rank)

    flops = head_cost(model.lm_head, decoder).flops
    for stack in (encoder, decoder):
        for block in stack.blocks:
            flops += block_cost(block, stack).flops
    return flops * workload.num_passes(one_rank)


def repeated_flops(
    model: STMoEForConditionalGeneration, workload: Workload, mesh: MeshConfig
) -> int:
    """Returns the operations of an update in addition to one forward and one backward pass, of all
    ranks.

    These are the blocks that activation checkpointing runs again, and the forward passes that only
    count choices for a balance loss over several passes. Computation outside the blocks, such as
    the product with the vocabulary, is not checkpointed.
    """
    flops = 0
    if pass_counts(model, workload, mesh).counts_first:
        flops += forward_flops(model, workload)
    if not workload.activation_checkpointing:
        return flops

    one_rank = MeshConfig()
    num_passes = workload.num_passes(one_rank)
    for stack in stack_passes(model, workload, one_rank):
        for block in stack.blocks:
            flops += num_passes * recomputed_flops(block, stack)
    return flops


def block_cost(block: Block, stack: StackPass) -> LayerCost:
    """Returns the cost of a block: of its layers, and of the dropout after each but the norms."""
    flops = 0
    saved_bytes = 0
    for layer in block.children():
        if layer is block.dropout:
            continue
        cost = layer_cost(layer, stack)
        flops += cost.flops
        saved_bytes += cost.saved_bytes
        if not isinstance(layer, RMSNorm | RelativePositionBias):
            residual = stack.num_tokens * stack.d_model
            saved_bytes += dropout_mask_bytes(residual, block.dropout.p)
    return LayerCost(flops, saved_bytes)


def recomputed_flops(block: Block, stack: StackPass) -> int:
    """Returns the operations of a block that activation checkpointing repeats.

    torch stops as soon as it has every tensor that the backward pass reads. The block's output is
    not one of them unless dropout follows, so the product that makes it is not repeated. A sparse
    layer at the end is repeated as a whole: the gradient of a combine weight reads the output of
    the experts.
    """
    flops = block_cost(block, stack).flops
    ends_dense = block.stacked or not block.sparse
    if ends_dense and not block.dropout.p:
        F = block.feed_forward.down_proj.in_features // stack.tp
        flops -= 2 * stack.num_tokens * stack.d_model * F
    return flops


@functools.singledispatch
def layer_cost(layer: nn.Module, stack: StackPass) -> LayerCost:
    """Returns the cost of one layer of a block; a new kind of layer registers a function.

    Args:
        layer: Child of a block.
        stack: The pass that it is part of.
    """
    raise AssertionError(f"no cost is registered for {type(layer).__name__}")


@layer_cost.register
def norm_cost(layer: RMSNorm, stack: StackPass) -> LayerCost:
    """Returns the cost of a norm; it keeps its input, which the residual stream does not."""
    inputs = stack.num_tokens * stack.d_model * FLOAT32_BYTES
    inverse_rms = stack.num_tokens * FLOAT32_BYTES
    normalised = inputs if stack.cpu else 0
    return LayerCost(0, inputs + inverse_rms + normalised)


@layer_cost.register
def position_bias_cost(layer: RelativePositionBias, stack: StackPass) -> LayerCost:
    """Returns the cost of relative positions: the buckets of distances are kept."""
    return LayerCost(0, stack.length * stack.length * _INT64_BYTES)


@layer_cost.register
def attention_cost(layer: Attention, stack: StackPass) -> LayerCost:
    """Returns the cost of self-attention, or of attention to the memory."""
    source = stack.memory if layer.cross else stack
    assert source is not None, "only a decoder has cross-attention"
    D = stack.d_model
    A = layer.q_proj.out_features // stack.tp  # heads x d_kv of this rank
    H = A // layer.d_kv
    queries = stack.num_tokens
    keys = source.num_tokens

    # Products: query and output, key and value; then scores and weighted sums.
    flops = 4 * (queries + keys) * D * A + 4 * queries * source.length * A

    # Inputs: one for all three products, and the memory once for all blocks; with casts a copy for
    # each product.
    saved_bytes = queries * D * FLOAT32_BYTES
    if stack.casts_inputs:
        saved_bytes = (queries + 2 * keys) * D * stack.product_bytes

    # Query and output, key and value.
    saved_bytes += 2 * (queries + keys) * A * stack.product_bytes

    # With dropout a CPU runs no fused kernel: it keeps probabilities, those after dropout, and the
    # mask between them.
    scores = H * queries * source.length
    if stack.cpu and layer.dropout_rate:
        score_bytes = FLOAT32_BYTES + stack.product_bytes + 1
        return LayerCost(flops, saved_bytes + scores * score_bytes)

    # Nor with a learned bias: it keeps probabilities, and works in float32.
    if stack.cpu and not layer.cross:
        casts = (queries + 2 * keys) * A * (FLOAT32_BYTES - stack.product_bytes)
        return LayerCost(flops, saved_bytes + scores * FLOAT32_BYTES + casts)

    # A fused kernel keeps the logsumexp of the scores, and a cast copy of the bias.
    saved_bytes += H * queries * FLOAT32_BYTES
    if stack.casts_inputs and not layer.cross:
        saved_bytes += position_bias_elements(H, stack) * stack.product_bytes
    return LayerCost(flops, saved_bytes)


def position_bias_elements(num_heads: int, stack: StackPass) -> int:
    """Returns the numbers in the bias of self-attention, which all sequences share."""
    return num_heads * stack.length * stack.length


@layer_cost.register
def feed_forward_cost(layer: FeedForward, stack: StackPass) -> LayerCost:
    """Returns the cost of a dense feed-forward layer."""
    F = layer.down_proj.in_features // stack.tp
    return _dense_cost(stack, F, gated=layer.gated, dropout_rate=layer.dropout_rate)


def _dense_cost(stack: StackPass, F: int, *, gated: bool, dropout_rate: float) -> LayerCost:
    """Returns the cost of F hidden units that every token uses."""
    tokens = stack.num_tokens
    D = stack.d_model
    num_products = 3 if gated else 2
    flops = 2 * num_products * tokens * D * F

    # Gated: gate, up, GELU of the gate, and their product; else ReLU's result.
    num_hidden = 4 if gated else 1
    saved_bytes = tokens * (D + num_hidden * F) * stack.product_bytes
    saved_bytes += dropout_mask_bytes(tokens * F, dropout_rate)
    return LayerCost(flops, saved_bytes)


@layer_cost.register
def sparse_cost(layer: SparseFeedForward, stack: StackPass) -> LayerCost:
    """Returns the cost of a sparse layer: its router, its dispatch and its experts."""
    config = layer.config
    tokens = stack.num_tokens
    rows = stack.expert_rows(layer)
    choices = stack.num_choices(layer)
    D = stack.d_model
    F = config.d_ff // stack.tp
    num_products = 3 if config.gated else 2
    gate_products = tokens * layer.router.num_parameters(config)
    flops = 2 * (gate_products + num_products * rows * D * F)

    # Router: its input with padding masked; logits and probabilities; three numbers per token;
    # per choice, its expert, gate value, combine weight and whether it was accepted.
    choice_bytes = _INT64_BYTES + 2 * FLOAT32_BYTES + 1
    saved_bytes = tokens * D * FLOAT32_BYTES
    saved_bytes += tokens * (2 * config.num_experts + 3) * FLOAT32_BYTES
    saved_bytes += choices * choice_bytes

    # Dispatch: token and weight of each row; with fixed slots the slot of each choice too.
    saved_bytes += rows * (_INT64_BYTES + FLOAT32_BYTES)
    if config.dispatch == "static":
        saved_bytes += choices * _INT64_BYTES

    saved_bytes += _expert_elements(layer, stack) * stack.product_bytes
    rate = config.expert_dropout_rate
    saved_bytes += dropout_mask_bytes(rows * F, rate)
    if config.num_shared_experts:
        width = config.num_shared_experts * F
        shared = _dense_cost(stack, width, gated=config.gated, dropout_rate=rate)
        return LayerCost(flops + shared.flops, saved_bytes + shared.saved_bytes)
    return LayerCost(flops, saved_bytes)


def _expert_elements(layer: SparseFeedForward, stack: StackPass) -> int:
    """Returns the numbers in the dtype of products that dispatch, experts and combine keep."""
    config = layer.config
    rows = stack.expert_rows(layer)
    D = stack.d_model
    F = config.d_ff // stack.tp

    # Gated: gate, up, GELU of the gate, and their product; else ReLU's result.
    num_hidden = 4 if config.gated else 1
    hidden = rows * num_hidden * F
    if config.dispatch == "static":
        return rows * 3 * D + hidden

    # Experts on a CPU compute the product again, and read tokens where they are.
    if stack.cpu and config.gated:
        hidden = rows * 3 * F
    reads_in_place = stack.cpu and not stack.expert_parallel
    inputs = stack.num_tokens if reads_in_place else rows
    return (inputs + rows) * D + hidden


def head_cost(head: Projection, stack: StackPass) -> LayerCost:
    """Returns the cost of the head and the loss on a decoder's last states."""
    tokens = stack.num_tokens
    vocab_size = head.out_features
    flops = 2 * tokens * stack.d_model * vocab_size

    # Last states and logits; label, mask and logsumexp of each token.
    saved_bytes = tokens * (stack.d_model + vocab_size) * stack.product_bytes
    saved_bytes += tokens * (_INT64_BYTES + 1 + FLOAT32_BYTES)
    return LayerCost(flops, saved_bytes)


def dropout_mask_bytes(num_elements: int, rate: float) -> int:
    """Returns the bytes of dropout's mask over so many numbers, a byte for each.

    Args:
        num_elements: Numbers that dropout sees.
        rate: 0 keeps no mask.
    """
    return num_elements if rate else 0
