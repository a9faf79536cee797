"""What the models return."""

from dataclasses import dataclass

from torch import Tensor
from transformers import EncoderDecoderCache
from transformers.utils.generic import ModelOutput

from moe.sparse.layer import RouterOutput


@dataclass
class STMoEEncoderOutput(ModelOutput):
    """Output of the encoder.

    Attributes:
        last_hidden_state: <float>[B, L, D].
        encoder_router_outputs: One for each sparse layer.
    """

    last_hidden_state: Tensor | None = None
    encoder_router_outputs: tuple[RouterOutput, ...] | None = None


@dataclass
class STMoEModelOutput(ModelOutput):
    """Output of encoder and decoder.

    Attributes:
        last_hidden_state: <float>[B, T, D] of the decoder.
        past_key_values: Cache for the next step, if asked for.
        encoder_last_hidden_state: <float>[B, L, D].
        encoder_router_outputs: One for each sparse layer of the encoder; None when it did not run here.
        decoder_router_outputs: One for each sparse layer of the decoder.
    """

    last_hidden_state: Tensor | None = None
    past_key_values: EncoderDecoderCache | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_router_outputs: tuple[RouterOutput, ...] | None = None
    decoder_router_outputs: tuple[RouterOutput, ...] | None = None


@dataclass
class STMoEOutput(ModelOutput):
    """Output of the model with a head; the losses are there when labels are given. See `Losses` for each of them.

    Attributes:
        loss: <float32>[] what is minimised: cross-entropy and all weighted auxiliary losses.
        ce_loss: <float32>[] cross-entropy alone, in nats for each target token.
        z_loss: <float32>[] of the vocabulary logits, unweighted.
        load_balance_loss: <float32>[] sum or mean over sparse layers, unweighted.
        router_z_loss: <float32>[] the same.
        logits: <float>[B, T, V].
        past_key_values: Cache for the next step, if asked for.
        encoder_last_hidden_state: <float>[B, L, D].
        encoder_router_outputs: One for each sparse layer of the encoder; None when it did not run here.
        decoder_router_outputs: One for each sparse layer of the decoder.
    """

    loss: Tensor | None = None
    ce_loss: Tensor | None = None
    z_loss: Tensor | None = None
    load_balance_loss: Tensor | None = None
    router_z_loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: EncoderDecoderCache | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_router_outputs: tuple[RouterOutput, ...] | None = None
    decoder_router_outputs: tuple[RouterOutput, ...] | None = None
