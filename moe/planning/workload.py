"""What a rank does in one update: rows, lengths, passes, and how many rows its experts work on.
Comes first.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from moe.checks import check_field_types, check_integer
from moe.distributed.mesh import MeshConfig
from moe.models.configuration import STMoEConfig
from moe.sparse.capacity import slots_of_expert
from moe.sparse.groups import sequences_per_group, tokens_per_group

_LARGEST = 2**31 - 1
_WHY_LARGEST = "an update of more fits on no cluster"


@dataclass(frozen=True)
class Workload:
    """An update, as a recipe has it.

    Attributes:
        batch_size: Sequences in an update, over all ranks.
        inputs_length: Encoder tokens of a sequence with padding.
        targets_length: Decoder tokens of a sequence with padding.
        micro_batch_size: Sequences in a forward pass of one rank; None for all that it has.
        precision: Of products, and of the parameters of blocks as they are gathered; parameters,
            gradients and the optimizer's state are float32 in either.
        activation_checkpointing: Whether a block keeps its input only.
        optimizer: `adafactor` or `adamw`.
        masked: Whether batches come with segments, as pairs of texts do; then every sequence has a
            bias of its own in attention. Those of span corruption fill their rows and need none.

    Raises:
        ConfigError: When a number is out of range.
    """

    batch_size: int
    inputs_length: int
    targets_length: int
    micro_batch_size: int | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    activation_checkpointing: bool = False
    optimizer: str = "adafactor"
    masked: bool = False

    def __post_init__(self) -> None:
        check_field_types(self)
        for name in ("batch_size", "inputs_length", "targets_length"):
            check_integer(name, getattr(self, name), least=1, most=_LARGEST, reason=_WHY_LARGEST)
        check_integer("micro_batch_size", self.micro_batch_size, least=1, optional="None for all")

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of a sequence in the encoder and the decoder."""
        return self.inputs_length, self.targets_length

    @property
    def product_bytes(self) -> int:
        """Bytes of a number in a product."""
        return 2 if self.precision == "bfloat16" else 4

    def rows_of_rank(self, mesh: MeshConfig) -> int:
        """Returns the sequences of a rank in an update."""
        return self.batch_size // mesh.num_data_ranks

    def rows_of_pass(self, mesh: MeshConfig) -> int:
        """Returns the sequences in a forward pass of a rank."""
        return self.micro_batch_size or self.rows_of_rank(mesh)

    def num_passes(self, mesh: MeshConfig) -> int:
        """Returns the forward and backward passes in an update."""
        return self.rows_of_rank(mesh) // self.rows_of_pass(mesh)


class StackPass(NamedTuple):
    """One forward pass of a stack on one rank.

    Attributes:
        decoder: Whether it is the decoder.
        num_rows: Sequences.
        length: Tokens of a sequence.
        num_blocks: Blocks.
        num_sparse: Blocks with a sparse layer.
        expert_rows: Rows of D that a sparse layer gives its experts: all slots when dispatch is
            `static`; when it is `ragged`, at most so many are accepted, namely all places of all
            tokens, or all slots if those are fewer.
        places: Places of a token in a plan, K.
    """

    decoder: bool
    num_rows: int
    length: int
    num_blocks: int
    num_sparse: int
    expert_rows: int
    places: int

    @property
    def num_tokens(self) -> int:
        """Tokens with their padding."""
        return self.num_rows * self.length


def stack_passes(
    config: STMoEConfig, workload: Workload, mesh: MeshConfig
) -> tuple[StackPass, StackPass]:
    """Returns a forward pass of the encoder and one of the decoder."""
    rows = workload.rows_of_pass(mesh)
    return (
        _stack_pass(config, rows, workload.inputs_length, decoder=False),
        _stack_pass(config, rows, workload.targets_length, decoder=True),
    )


def _stack_pass(config: STMoEConfig, rows: int, length: int, *, decoder: bool) -> StackPass:
    """Returns the forward pass of one stack over `rows` sequences of `length` tokens."""
    blocks = config.num_decoder_layers if decoder else config.num_layers
    assert blocks is not None, "the config fills num_decoder_layers"
    sparse = config.num_sparse_decoder_layers if decoder else config.num_sparse_encoder_layers
    if not sparse:
        return StackPass(decoder, rows, length, blocks, 0, 0, 0)
    layer = config.sparse_config(decoder=decoder)
    places = layer.num_experts if layer.router == "expert_choice" else layer.num_selected_experts
    sequences = sequences_per_group(rows, length, tokens_per_group(layer))
    size = sequences * length
    capacity = slots_of_expert(layer, size, training=True)
    capacity = size if capacity is None else capacity
    slots = rows // sequences * capacity * layer.num_experts
    used = slots if layer.dispatch == "static" else min(slots, rows * length * places)
    return StackPass(decoder, rows, length, blocks, sparse, used, places)


def groups_alike(config: STMoEConfig, workload: Workload, mesh: MeshConfig) -> bool:
    """Returns whether a rank's passes route tokens in the same groups as the whole batch would be."""
    if not (config.num_sparse_encoder_layers or config.num_sparse_decoder_layers):
        return True
    rows, size = workload.rows_of_pass(mesh), tokens_per_group(config)
    return all(
        sequences_per_group(workload.batch_size, length, size)
        == sequences_per_group(rows, length, size)
        for length in workload.lengths
    )
