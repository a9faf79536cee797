"""The work of a rank in one update: rows, lengths, passes, and rows of its experts.

The other modules of this folder count with these records.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

from moe.distributed.mesh import MeshConfig
from moe.models.blocks import Block, Stack
from moe.models.modeling import STMoEForConditionalGeneration
from moe.sparse.capacity import slots_of_expert
from moe.sparse.groups import sequences_per_group, tokens_per_group
from moe.sparse.layer import SparseFeedForward
from moe.sparse.losses import num_scope_ranks

FLOAT32_BYTES = 4
"""Bytes of a number in parameters, gradients, optimizer state and the residual stream."""


@dataclass(frozen=True)
class Workload:
    """An update, as a recipe describes it; the recipe checks its numbers.

    Attributes:
        batch_size: Sequences in an update, over all ranks.
        inputs_length: Encoder tokens of a sequence with padding.
        targets_length: Decoder tokens of a sequence with padding.
        micro_batch_size: Sequences in a forward pass of one rank; None for all its sequences.
        precision: Precision of matrix products, and of the parameters of blocks as they are
            gathered; parameters, gradients and the optimizer's state are float32 in either.
        activation_checkpointing: Whether a block keeps only its input.
        optimizer: A name in `moe.optim.optimizers.OPTIMIZERS`.
        optimizer_options: Options of that optimizer by name, as a recipe gives them.
    """

    batch_size: int
    inputs_length: int
    targets_length: int
    micro_batch_size: int | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    activation_checkpointing: bool = False
    optimizer: str = "adafactor"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of a sequence in the encoder and the decoder."""
        return self.inputs_length, self.targets_length

    @property
    def bfloat16(self) -> bool:
        """Whether matrix products are in bfloat16."""
        return self.precision == "bfloat16"

    @property
    def product_bytes(self) -> int:
        """Bytes of a number in a matrix product."""
        return 2 if self.bfloat16 else FLOAT32_BYTES

    def rows_of_rank(self, mesh: MeshConfig) -> int:
        """Returns the sequences of a rank in an update."""
        return self.batch_size // mesh.num_data_ranks

    def rows_of_pass(self, mesh: MeshConfig) -> int:
        """Returns the sequences in a forward pass of a rank."""
        return self.micro_batch_size or self.rows_of_rank(mesh)

    def num_passes(self, mesh: MeshConfig) -> int:
        """Returns the forward and backward passes in an update."""
        return self.rows_of_rank(mesh) // self.rows_of_pass(mesh)


class PassCounts(NamedTuple):
    """Numbers of passes of a rank in an update.

    Attributes:
        backward: Backward passes.
        forward: Forward passes; twice as many if the balance loss needs all shares before it
            starts.
        recomputed: Forward passes that activation checkpointing repeats.
    """

    backward: int
    forward: int
    recomputed: int

    @property
    def counts_first(self) -> bool:
        """Whether separate forward passes count choices for the balance loss."""
        return self.forward > self.backward


def pass_counts(
    model: STMoEForConditionalGeneration, workload: Workload, mesh: MeshConfig
) -> PassCounts:
    """Returns the number of passes of a rank in an update.

    Args:
        model: Whole or on a mesh, on any device.
        workload: The update.
        mesh: Sizes.
    """
    num_passes = workload.num_passes(mesh)

    # A balance loss over several passes needs the counts of all: an extra forward pass collects them.
    scope = model.config.balance_scope
    is_wide = scope in ("ranks", "global")
    counts_first = is_wide and num_passes * num_scope_ranks(scope, mesh) > 1
    return PassCounts(
        backward=num_passes,
        forward=2 * num_passes if counts_first else num_passes,
        recomputed=num_passes if workload.activation_checkpointing else 0,
    )


@dataclass(frozen=True)
class StackPass:
    """One forward pass of a stack on one rank.

    Attributes:
        module: Encoder or decoder.
        memory: The encoder's pass, to which a decoder attends; None for the encoder.
        num_rows: Sequences.
        length: Tokens of a sequence.
        tp: Ranks that share heads and hidden units.
        expert_parallel: Whether experts are on other ranks too.
        product_bytes: Bytes of a number in a matrix product.
        cpu: Whether to count the kernels of a CPU instead of an accelerator's.
    """

    module: Stack
    memory: "StackPass | None"
    num_rows: int
    length: int
    tp: int
    expert_parallel: bool
    product_bytes: int
    cpu: bool

    @property
    def num_tokens(self) -> int:
        """Tokens with their padding."""
        return self.num_rows * self.length

    @property
    def d_model(self) -> int:
        """Width of the residual stream, D."""
        return self.module.final_norm.weight.shape[0]

    @property
    def casts_inputs(self) -> bool:
        """Whether every matrix product makes a copy of its float32 input."""
        return self.product_bytes < FLOAT32_BYTES

    @property
    def blocks(self) -> list[Block]:
        """Blocks of the stack."""
        return [cast(Block, block) for block in self.module.blocks]

    @property
    def sparse_layers(self) -> list[SparseFeedForward]:
        """Sparse layers of the stack."""
        return [block.sparse_feed_forward for block in self.blocks if block.sparse]

    def expert_rows(self, layer: SparseFeedForward) -> int:
        """Returns the rows of D that a sparse layer gives its experts, all of them together.

        These are all slots when dispatch is `static`. When it is `ragged`, they are the most that
        can be accepted: all choices of all tokens, or all slots if those are fewer.
        """
        config = layer.config

        # Groups of whole sequences, S tokens each.
        sequences = sequences_per_group(self.num_rows, self.length, tokens_per_group(config))
        group_size = sequences * self.length
        num_groups = self.num_rows // sequences

        # C slots of each expert in each group; without a capacity there are slots for every token.
        capacity = slots_of_expert(config, group_size, training=True)
        if capacity is None:
            capacity = group_size
        num_slots = num_groups * capacity * config.num_experts

        # Fixed slots are computed whether they are filled or not.
        if config.dispatch == "static":
            return num_slots
        return min(num_slots, self.num_choices(layer))

    def num_choices(self, layer: SparseFeedForward) -> int:
        """Returns the choices of all tokens in the plan of a sparse layer, T x K."""
        return self.num_tokens * layer.router.num_choices(layer.config)


def stack_passes(
    model: STMoEForConditionalGeneration, workload: Workload, mesh: MeshConfig, *, cpu: bool = False
) -> tuple[StackPass, StackPass]:
    """Returns a forward pass of the encoder and one of the decoder.

    Args:
        model: Whole or on a mesh, on any device.
        workload: The update.
        mesh: Sizes.
        cpu: Whether to count the kernels of a CPU instead of an accelerator's.
    """
    encoder = _stack_pass(model.model.encoder.stack, None, workload, mesh, cpu)
    decoder = _stack_pass(model.model.decoder, encoder, workload, mesh, cpu)
    return encoder, decoder


def _stack_pass(
    module: Stack, memory: StackPass | None, workload: Workload, mesh: MeshConfig, cpu: bool
) -> StackPass:
    """Returns the forward pass of one stack."""
    length = workload.targets_length if module.decoder else workload.inputs_length
    return StackPass(
        module=module,
        memory=memory,
        num_rows=workload.rows_of_pass(mesh),
        length=length,
        tp=mesh.tp,
        expert_parallel=mesh.ep > 1,
        product_bytes=workload.product_bytes,
        cpu=cpu,
    )
