"""Outputs of the models: transformers' names in transformers' order, then our own fields."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import EncoderDecoderCache
from transformers.utils.generic import ModelOutput

from moe.kernels.torch_private import register_named_tuple, register_tree_node
from moe.models.blocks import BlockOutput, StackOutput
from moe.models.losses import LossCounts, Losses, StackCounts
from moe.sparse.layer import RouterOutput
from moe.sparse.losses import RouterLosses
from moe.sparse.plan import DispatchPlan
from moe.sparse.stats import RouterStats

_RECORDS_OF_A_LAYER = (RouterOutput, DispatchPlan, RouterLosses, RouterStats)
_RECORDS_OF_A_MODEL = (BlockOutput, StackOutput, LossCounts, StackCounts, Losses)

# torch.export saves only those records whose names it knows.
for record in (*_RECORDS_OF_A_LAYER, *_RECORDS_OF_A_MODEL):
    register_named_tuple(record)


class RouterRecords(Sequence[RouterOutput]):
    """Records of the routers of a stack, one for each sparse layer.

    Deliberately not a tuple: transformers compares, gathers and truncates tuples by the sequences
    of the batch, but a record covers groups of sequences.
    """

    def __init__(self, records: Iterable[RouterOutput]) -> None:
        self._records = tuple(records)

    def __getitem__(self, index: Any) -> Any:
        """Returns the record of one layer, or a tuple of the records of a slice."""
        return self._records[index]

    def __len__(self) -> int:
        """Returns the number of sparse layers."""
        return len(self._records)

    def __repr__(self) -> str:
        """Returns the records formatted like a list."""
        return f"RouterRecords({list(self._records)!r})"


# As a pytree it is a list of records, so that compiled graphs and hooks reach their tensors.
def _flatten_records(records: RouterRecords) -> tuple[list[Any], None]:
    return list(records), None


def _unflatten_records(records: Iterable[Any], _: None) -> RouterRecords:
    return RouterRecords(records)


register_tree_node(RouterRecords, _flatten_records, _unflatten_records)


def logits_by_sequence(
    routers: Sequence[RouterOutput] | None, batch: int
) -> tuple[Tensor, ...] | None:
    """Returns the routers' logits in transformers' format, <float32>[B, L, E] for each layer.

    Args:
        routers: With logits <float32>[G, S, E]; a group is a whole number of sequences.
        batch: Sequences, B.
    """
    if routers is None:
        return None

    logits = []
    for router in routers:
        num_experts = router.router_logits.shape[-1]
        by_sequence = router.router_logits.reshape(batch, -1, num_experts)  # [G, S, E] -> [B, L, E]
        logits.append(by_sequence)
    return tuple(logits)


@dataclass
class STMoEEncoderOutput(ModelOutput):
    """Output of the encoder.

    Attributes:
        last_hidden_state: <float>[B, L, D].
        hidden_states: <float>[B, L, D] before each block, and the last; if requested.
        attentions: <float>[B, H, L, L] of each block; if requested.
        encoder_router_logits: <float32>[B, L, E] of each sparse layer, zeros for padding.
        encoder_router_outputs: One for each sparse layer.
        prefix_numbers: <int64>[B, L] prefix of each token's example, from 1, or 0; None when the
            model has no experts of a prefix.
    """

    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    encoder_router_logits: tuple[Tensor, ...] | None = None
    encoder_router_outputs: RouterRecords | None = None
    prefix_numbers: Tensor | None = None


@dataclass
class STMoEModelOutput(ModelOutput):
    """Output of encoder and decoder.

    Attributes:
        last_hidden_state: <float>[B, T, D] of the decoder.
        past_key_values: Cache for the next step, if requested.
        decoder_hidden_states: <float>[B, T, D] before each block, and the last; if requested, like
            the others below.
        decoder_attentions: <float>[B, H, T, keys] of each block.
        cross_attentions: <float>[B, H, T, L] of each block.
        encoder_last_hidden_state: <float>[B, L, D].
        encoder_hidden_states: <float>[B, L, D] before each block, and the last.
        encoder_attentions: <float>[B, H, L, L] of each block.
        encoder_router_logits: <float32>[B, L, E] of each sparse layer, zeros for padding.
        decoder_router_logits: <float32>[B, T, E] of each sparse layer.
        encoder_router_outputs: One for each sparse layer of the encoder; None when it did not run
            here.
        decoder_router_outputs: One for each sparse layer of the decoder.
    """

    last_hidden_state: Tensor | None = None
    past_key_values: EncoderDecoderCache | None = None
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    decoder_attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_attentions: tuple[Tensor, ...] | None = None
    encoder_router_logits: tuple[Tensor, ...] | None = None
    decoder_router_logits: tuple[Tensor, ...] | None = None
    encoder_router_outputs: RouterRecords | None = None
    decoder_router_outputs: RouterRecords | None = None


@dataclass
class STMoEOutput(ModelOutput):
    """Output of the model with a head, with the losses when labels are given; see `Losses`.

    Attributes:
        loss: <float32>[] total that is minimised: cross-entropy and weighted auxiliary losses.
        logits: <float>[B, T, V].
        past_key_values: See `STMoEModelOutput` for this and all fields not listed here.
        ce_loss: <float32>[] cross-entropy alone, in nats for each target token.
        z_loss: <float32>[] of the vocabulary logits, unweighted.
        load_balance_loss: <float32>[] sum or mean over sparse layers, unweighted.
        router_z_loss: <float32>[] the same.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: EncoderDecoderCache | None = None
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    decoder_attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_attentions: tuple[Tensor, ...] | None = None
    encoder_router_logits: tuple[Tensor, ...] | None = None
    decoder_router_logits: tuple[Tensor, ...] | None = None
    ce_loss: Tensor | None = None
    z_loss: Tensor | None = None
    load_balance_loss: Tensor | None = None
    router_z_loss: Tensor | None = None
    encoder_router_outputs: RouterRecords | None = None
    decoder_router_outputs: RouterRecords | None = None
