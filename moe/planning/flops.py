"""Arithmetic of a model: floating-point operations of its matrix products, two for each multiply
and add.
"""

from moe.distributed.mesh import MeshConfig
from moe.models.configuration import STMoEConfig
from moe.planning.workload import StackPass, Workload, stack_passes
from moe.sparse.all_routers import load_routers


def forward_flops(config: STMoEConfig, workload: Workload) -> int:
    """Returns the operations of a forward pass over one update, of all ranks together.

    Products with weights and attention over the whole length are counted, what stands between them
    is not. A token
    uses as many experts as have room for it: `StackPass.expert_rows`. A backward pass has twice as
    many.
    """
    alone = MeshConfig()
    encoder, decoder = stack_passes(config, workload, alone)
    head = 2 * decoder.num_tokens * config.d_model * config.vocab_size
    total = _stack(config, encoder, None) + _stack(config, decoder, encoder) + head
    return total * workload.num_passes(alone)


def training_flops_per_token(config: STMoEConfig, workload: Workload) -> float:
    """Returns the operations of forward and backward pass for each token of inputs and targets.

    What activation checkpointing does again is not counted: it is work of the machine, not of the
    model.
    """
    return 3 * forward_flops(config, workload) / (workload.batch_size * sum(workload.lengths))


def _stack(config: STMoEConfig, stack: StackPass, memory: StackPass | None) -> int:
    """Returns the operations of a forward pass of a stack, which attends to `memory` if there is
    one.
    """
    D, tokens, width = config.d_model, stack.num_tokens, config.num_heads * config.d_kv
    products = 3 if config.feed_forward_proj == "gated-gelu" else 2
    attention = 8 * tokens * D * width + 4 * tokens * stack.length * width
    if memory is not None:
        attention += (
            4 * (tokens + memory.num_tokens) * D * width + 4 * tokens * memory.length * width
        )
    num_dense = stack.num_blocks - (0 if config.sparse_dense_stacking else stack.num_sparse)
    rows = num_dense * tokens + stack.num_sparse * stack.expert_rows
    total = stack.num_blocks * attention + 2 * products * rows * D * config.d_ff
    if stack.num_sparse:
        layer = config.sparse_config(decoder=stack.decoder)
        total += (
            stack.num_sparse * 2 * tokens * load_routers().get(layer.router).num_parameters(layer)
        )
    return total
