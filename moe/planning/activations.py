"""Bytes of activations: what the graph of one forward pass keeps for its backward pass."""

from typing import NamedTuple

from moe.distributed.mesh import MeshConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.planning.layer_costs import (
    block_cost,
    dropout_mask_bytes,
    head_cost,
    norm_cost,
    position_bias_cost,
    position_bias_elements,
)
from moe.planning.workload import FLOAT32_BYTES, StackPass, Workload, stack_passes

_INT64_BYTES = 8


class Activations(NamedTuple):
    """Bytes of one rank.

    Attributes:
        saved: Bytes that saved-tensor hooks count in a forward pass.
        held: Additional memory of the stacks while they run, or run again: position biases with
            masks, and the memory.
        recomputed: Bytes that the largest block saves when activation checkpointing runs it again;
            else 0.
    """

    saved: int
    held: int
    recomputed: int

    @property
    def total(self) -> int:
        """All at once, in the backward pass of the largest block."""
        return self.saved + self.held + self.recomputed


def activations(
    model: STMoEForConditionalGeneration, workload: Workload, mesh: MeshConfig, *, cpu: bool = False
) -> Activations:
    """Returns the activations that one forward pass keeps on a rank.

    Args:
        model: Whole or on a mesh, on any device.
        workload: Rows, lengths, precision, checkpointing.
        mesh: Sizes.
        cpu: Whether to count the kernels of a CPU instead of an accelerator's.
    """
    checkpointing = workload.activation_checkpointing
    encoder, decoder = stack_passes(model, workload, mesh, cpu=cpu)
    saved = head_cost(model.lm_head, decoder).saved_bytes
    held = 0
    largest_block = 0

    for stack in (encoder, decoder):
        saved += _outside_blocks(stack)
        tables = 1 if stack.module.position_bias or checkpointing else len(stack.blocks)
        held += tables * _position_bias_bytes(stack)
        for block in stack.blocks:
            block_bytes = block_cost(block, stack).saved_bytes
            largest_block = max(largest_block, block_bytes)

            # A checkpointed block keeps its input only.
            saved += _residual_bytes(stack) if checkpointing else block_bytes

    # The memory serves all keys and values: where their products read it as it is, the graph keeps
    # it; else the decoder holds it.
    if encoder.casts_inputs or checkpointing:
        held += _residual_bytes(encoder)
    else:
        saved += _residual_bytes(encoder)
    return Activations(saved, held, largest_block if checkpointing else 0)


def _outside_blocks(stack: StackPass) -> int:
    """Returns the bytes that a stack keeps outside its blocks: ids, positions, and the final norm."""
    total = norm_cost(stack.module.final_norm, stack).saved_bytes
    total += stack.num_tokens * _INT64_BYTES  # ids
    if stack.module.position_bias is not None:
        total += position_bias_cost(stack.module.position_bias, stack).saved_bytes

    # Dropout before the first block and after the final norm.
    residual = stack.num_tokens * stack.d_model
    rate = stack.module.dropout.p
    return total + 2 * dropout_mask_bytes(residual, rate)


def _position_bias_bytes(stack: StackPass) -> int:
    """Returns the bytes of one bias of self-attention for this rank's heads."""
    attention = stack.blocks[0].self_attention
    num_heads = attention.q_proj.out_features // attention.d_kv // stack.tp
    return position_bias_elements(num_heads, stack) * FLOAT32_BYTES


def _residual_bytes(stack: StackPass) -> int:
    return stack.num_tokens * stack.d_model * FLOAT32_BYTES
