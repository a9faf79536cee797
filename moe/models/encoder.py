"""The encoder, inside the whole model and alone."""

from functools import wraps
from typing import Any, cast

from torch import Tensor, nn
from transformers import AutoModelForTextEncoding
from transformers.utils.generic import can_return_tuple

from moe.errors import DataError
from moe.models.blocks import Stack
from moe.models.configuration import STMoEConfig
from moe.models.inputs import check_token_ids, check_vectors, refuse_unknown_arguments
from moe.models.model_warnings import can_drop_tokens, warn_of_drops
from moe.models.outputs import RouterRecords, STMoEEncoderOutput, logits_by_sequence
from moe.models.pretrained import STMoEPreTrainedModel


class STMoEEncoder(STMoEPreTrainedModel):
    """The token embedding, which the decoder shares, and the encoder stack."""

    main_input_name = "input_ids"

    def __init__(self, config: STMoEConfig) -> None:
        # Every model has one encoder. Fields of the config may have been set one by one.
        config.validate()
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.stack = Stack(config, decoder=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        segment_ids: Tensor | None = None,
        output_router_logits: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        *,
        return_dict: bool | None = None,
        **further: Any,
    ) -> STMoEEncoderOutput:
        """Returns the encoder's hidden states.

        Args:
            input_ids: <int64>[B, L], or give `inputs_embeds`.
            attention_mask: <int64 or bool>[B, L], 0 for padding.
            inputs_embeds: <float>[B, L, D].
            segment_ids: <int64>[B, L] example of each token, 0 for padding.
            output_router_logits: Whether to return the records of the routers; None for the
                config's choice.
            output_attentions: Whether to return the weights of attention, which is then eager; None
                for the config's choice.
            output_hidden_states: Whether to return the hidden states of every layer; None for the
                config's choice.
            return_dict: False for a tuple of the fields that are not None; None for the config's
                choice.
            further: Other arguments, which must have no effect.

        Raises:
            DataError: When not exactly one of `input_ids` and `inputs_embeds` is given, or an input
                has another type, shape or range of values.
            ConfigError: When an argument is unknown.
        """
        refuse_unknown_arguments(further, type(self).forward)
        output_routers = self.argument_or_config("output_router_logits", output_router_logits)

        # Routers also report for the warning of drops.
        watch_drops = can_drop_tokens(self)
        output = self.stack(
            self.embed(input_ids, inputs_embeds),
            token_ids=input_ids,
            attention_mask=attention_mask,
            segment_ids=segment_ids,
            report=output_routers or watch_drops,
            output_attentions=self.argument_or_config("output_attentions", output_attentions),
            output_hidden_states=self.argument_or_config(
                "output_hidden_states", output_hidden_states
            ),
        )
        if watch_drops:
            warn_of_drops(self, self.config, self.stack, output.routers)

        # A dense encoder has no records.
        routers = None
        if output_routers and output.routers:
            routers = RouterRecords(output.routers)
        return STMoEEncoderOutput(
            last_hidden_state=output.hidden,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
            encoder_router_logits=logits_by_sequence(routers, output.hidden.shape[0]),
            encoder_router_outputs=routers,
            prefix_numbers=output.prefix_numbers,
        )

    def embed(self, ids: Tensor | None, vectors: Tensor | None, *, prefix: str = "") -> Tensor:
        """Returns <float>[B, L, D]: the vectors, or the embedding of <int64>[B, L].

        Args:
            ids: <int64>[B, L] token ids; None for vectors.
            vectors: <float>[B, L, D] in place of the ids.
            prefix: Prefix of the arguments' names, `decoder_` for the decoder.

        Raises:
            DataError: When not exactly one of both is given, or it has another type or shape.
        """
        if (ids is None) == (vectors is None):
            given = "neither" if ids is None else "both"
            raise DataError(
                f"Exactly one of token ids and embeddings is needed, but {given} were given. "
                "Pass input_ids or inputs_embeds, and for the decoder labels, "
                "decoder_input_ids or decoder_inputs_embeds."
            )

        if ids is not None:
            check_token_ids(f"{prefix}input_ids", ids, self.config.vocab_size)
            return self.embed_tokens(ids)

        assert vectors is not None, "exactly one of both is given"
        # Under autocast their dtype may differ from the residual stream's dtype.
        check_vectors(f"{prefix}inputs_embeds", vectors, self.config.d_model)
        return vectors.to(self.embed_tokens.weight.dtype)


class STMoEEncoderModel(STMoEPreTrainedModel):
    """The encoder alone; loads from a checkpoint of the whole model."""

    _keys_to_ignore_on_load_unexpected = [r"decoder\.", r"lm_head\."]

    def __init__(self, config: STMoEConfig) -> None:
        super().__init__(config)
        self.encoder = STMoEEncoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """Returns the token embedding [V, D]."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the token embedding."""
        self.encoder.embed_tokens = cast(nn.Embedding, value)

    @can_return_tuple
    @wraps(STMoEEncoder.forward)
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # wrapped
        self, *args: Any, **kwargs: Any
    ) -> STMoEEncoderOutput:
        """Returns the encoder's hidden states; see `STMoEEncoder.forward`."""
        return self.encoder(*args, **kwargs, return_dict=True)


AutoModelForTextEncoding.register(STMoEConfig, STMoEEncoderModel)
