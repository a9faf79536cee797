"""Description of a host: where its feed-forward layers are, and what they compute."""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, get_args

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from moe.checks import check_choice
from moe.sparse.config import Activation

_OTHER_NAMES = {"gelu_new": "gelu_pytorch_tanh", "swish": "silu"}
"""Further names that transformers has for activations of experts."""


@dataclass(frozen=True)
class HostStack:
    """Where a stack of blocks is.

    Attributes:
        module: Path of the stack in the model: its `forward` takes `attention_mask`, and hands
            keyword arguments that it does not know to its blocks.
        config: Path of the stack's configuration in that of the model.
        blocks: Name of the list of blocks in the stack.
    """

    module: str
    config: str
    blocks: str = "layers"


@dataclass(frozen=True)
class Host:
    """Describes an encoder-decoder of transformers.

    Attributes:
        dense_class: Its class with dense feed-forwards.
        encoder: Where the encoder is.
        decoder: Where the decoder is.
        feed_forward: Name of the feed-forward in a block; it maps <any float>[B, L, D] to the same
            shape.
        first: Linear modules of the feed-forward that make hidden units: gate and up projection,
            or one projection if the feed-forward has no gate.
        down: Its linear module that leads back to D.
        norm_after: Norm in the block between the feed-forward and the residual sum, to which the
            scale of the feed-forward does not matter; None if there is none.
        d_model: Field of a stack's configuration with the width of a token.
        d_ff: Field with the number of hidden units.
        activation: Field with the name of the activation.
        dropout_rate: Field with the dropout on hidden units.
        num_blocks: Field with the number of blocks.
    """

    dense_class: type[PreTrainedModel]
    encoder: HostStack
    decoder: HostStack
    feed_forward: str
    first: tuple[str, ...]
    down: str
    norm_after: str | None
    d_model: str = "hidden_size"
    d_ff: str = "intermediate_size"
    activation: str = "hidden_activation"
    dropout_rate: str = "dropout_rate"
    num_blocks: str = "num_hidden_layers"

    def stack(self, *, decoder: bool) -> HostStack:
        """Returns where one of the stacks is."""
        return self.decoder if decoder else self.encoder

    def stack_module(self, model: nn.Module, *, decoder: bool) -> nn.Module:
        """Returns a stack of a model."""
        return model.get_submodule(self.stack(decoder=decoder).module)

    def stack_config(self, config: PreTrainedConfig, *, decoder: bool) -> Any:
        """Returns the configuration of a stack."""
        return attrgetter(self.stack(decoder=decoder).config)(config)

    def count_blocks(self, config: PreTrainedConfig, *, decoder: bool) -> int:
        """Returns the number of blocks of a stack."""
        return getattr(self.stack_config(config, decoder=decoder), self.num_blocks)

    def layer_fields(self, config: PreTrainedConfig, *, decoder: bool) -> dict[str, Any]:
        """Returns the fields of SparseConfig that follow from the host.

        Raises:
            ConfigError: When the activation is one that experts do not have.
        """
        stack = self.stack_config(config, decoder=decoder)
        activation = getattr(stack, self.activation)
        activation = _OTHER_NAMES.get(activation, activation)
        check_choice(self.activation, activation, get_args(Activation))
        return {
            "d_model": getattr(stack, self.d_model),
            "d_ff": getattr(stack, self.d_ff),
            "activation": activation,
            "gated": len(self.first) == 2,
            "decoder": decoder,
            "expert_dropout_rate": float(getattr(stack, self.dropout_rate)),
        }
