"""Arithmetic of a model: floating-point operations, two for each multiply and add."""

from moe.distributed.mesh import MeshConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.planning.layer_costs import block_cost, head_cost, recomputed_flops
from moe.planning.workload import Workload, pass_counts, stack_passes


def forward_flops(model: STMoEForConditionalGeneration, workload: Workload) -> int:
    """Returns the operations of a forward pass over one update, of all ranks together.

    Products with weights and attention over the whole length are counted, what stands between them
    is not. A token uses as many experts as have room for it: `StackPass.expert_rows`. A backward
    pass has twice as many.
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
    """Returns the operations of an update beside one forward and one backward pass, of all ranks.

    These are the blocks that activation checkpointing runs again, and the forward passes that only
    count choices for a balance loss over several passes. What lies outside blocks, such as the
    product with the vocabulary, is not checkpointed.
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
