"""Description of a host: where its feed-forward layers are, and what they compute."""

from dataclasses import dataclass
from typing import Any, get_args

from torch import nn
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

from moe.checks import check_choice
from moe.sparse.config import Activation
from moe.sparse.editing import Stack

_OTHER_NAMES = {"gelu_new": "gelu_pytorch_tanh", "swish": "silu"}
"""Further names that transformers has for activations of experts."""


@dataclass(frozen=True)
class Host:
    """Describes an encoder-decoder of transformers; the defaults are those of BART and its kin.

    Its stacks have a list of blocks called `layers`, a `config`, a `forward` that takes
    `attention_mask`, and hand keyword arguments that they do not know to their blocks. Paths of
    modules that follow a block begin there.

    Attributes:
        dense_class: Its class with dense feed-forwards.
        encoder: Path of the encoder in the model.
        decoder: Path of the decoder.
        feed_forward: The module that the sparse layer replaces; it is called with hidden states
            <any float>[B, L, D].
        first: Linear modules that make hidden units: gate and up projection, or one projection if
            the feed-forward has no gate.
        down: The linear module that leads back to D.
        identities: Modules that become identities, since the block itself calls them, one after the
            other, on what `feed_forward` returns. Its attribute `dropout` is then set to 0.
        activation: Field of a stack's configuration with the name of the activation.
        dropout: Field with the dropout on hidden units.
        norm_after: Norm in the block between the feed-forward and the residual sum, to which the
            scale of the feed-forward does not matter; None if there is none.
        auto_class: Auto class that finds the model.
    """

    dense_class: type[PreTrainedModel]
    encoder: str = "model.encoder"
    decoder: str = "model.decoder"
    feed_forward: str = "fc1"
    first: tuple[str, ...] = ("fc1",)
    down: str = "fc2"
    identities: tuple[str, ...] = ("activation_fn", "fc2")
    activation: str = "activation_function"
    dropout: str = "activation_dropout"
    norm_after: str | None = None
    auto_class: Any = AutoModelForSeq2SeqLM

    def stack(self, model: nn.Module, name: Stack) -> Any:
        """Returns a stack of a model."""
        return model.get_submodule(getattr(self, name))

    def layer_fields(self, model: nn.Module, stack_name: Stack) -> dict[str, Any]:
        """Returns the fields of SparseConfig that follow from a dense model.

        Raises:
            ConfigError: When the activation is one that experts do not have.
        """
        stack = self.stack(model, stack_name)
        activation = getattr(stack.config, self.activation)
        activation = _OTHER_NAMES.get(activation, activation)
        check_choice(self.activation, activation, get_args(Activation))
        down = stack.layers[0].get_submodule(self.down)
        return {
            "d_model": down.out_features,
            "d_ff": down.in_features,
            "activation": activation,
            "gated": len(self.first) == 2,
            "product_bias": down.bias is not None,
            "decoder": stack_name == "decoder",
            "expert_dropout_rate": float(getattr(stack.config, self.dropout)),
        }

    def put_layer(self, block: nn.Module, layer: nn.Module) -> None:
        """Replaces the feed-forward of a block, all of whose steps `layer` computes."""
        for name in self.identities:
            setattr(block, name, nn.Identity())
        if self.identities:
            setattr(block, self.dropout, 0.0)
        setattr(block, self.feed_forward, layer)
