"""Arithmetic of a model: floating-point operations, two for each multiply and add."""

from moe.distributed.mesh import MeshConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.planning.layer_costs import block_cost, head_cost
from moe.planning.workload import Workload, stack_passes


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


def training_flops_per_token(model: STMoEForConditionalGeneration, workload: Workload) -> float:
    """Returns the operations of forward and backward pass for each token of inputs and targets.

    What activation checkpointing does again is not counted: it is work of the machine, not of the
    model.
    """
    num_tokens = workload.batch_size * sum(workload.lengths)
    return 3 * forward_flops(model, workload) / num_tokens
