"""The model classes: encoder-decoder with sparse layers as transformers expects them."""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin
from transformers.utils.generic import can_return_tuple

from moe.errors import ConfigError, DataError
from moe.models.attention import Projection
from moe.models.blocks import Block, Stack
from moe.models.configuration import STMoEConfig
from moe.models.losses import LossCounts, count_losses, model_losses, refuse_missing_labels
from moe.models.outputs import STMoEEncoderOutput, STMoEModelOutput, STMoEOutput
from moe.models.pretrained import STMoEPreTrainedModel
from moe.sparse.layer import SparseFeedForward


class STMoEEncoder(STMoEPreTrainedModel):
    """The token embedding, which the decoder shares, and the encoder stack."""

    main_input_name = "input_ids"

    def __init__(self, config: STMoEConfig) -> None:
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
    ) -> STMoEEncoderOutput:
        """Returns the encoder's hidden states.

        Args:
            input_ids: <int64>[B, L], or give `inputs_embeds`.
            attention_mask: <int64 or bool>[B, L], 0 for padding.
            inputs_embeds: <float>[B, L, D].
            segment_ids: <int64>[B, L] example of each token, 0 for padding.
            output_router_logits: Whether to return what the routers did; None for the config's choice.
            output_attentions: `generate` passes it; only False is served.
            output_hidden_states: The same.

        Raises:
            DataError: When not exactly one of `input_ids` and `inputs_embeds` is given.
            ConfigError: When attention weights or hidden states of all layers are asked for.
        """
        if output_attentions or output_hidden_states:
            raise ConfigError(
                "output_attentions and output_hidden_states are not served by STMoE models. Leave them unset, and "
                "read inner values with a forward hook on the blocks of `encoder.stack` or `decoder`."
            )
        x = embed(self.embed_tokens, input_ids, inputs_embeds)
        wanted = self.config.output_router_logits if output_router_logits is None else output_router_logits
        x, routers = self.stack(
            x, token_ids=input_ids, attention_mask=attention_mask, segment_ids=segment_ids, report=wanted
        )
        return STMoEEncoderOutput(x, routers if wanted else None)


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

    def forward(self, *args: Any, **kwargs: Any) -> STMoEEncoderOutput:
        """Returns the encoder's hidden states; arguments are those of `STMoEEncoder.forward`."""
        return self.encoder(*args, **kwargs)


class STMoEModel(STMoEPreTrainedModel):
    """Encoder and decoder without a head."""

    _keys_to_ignore_on_load_unexpected = [r"lm_head\."]

    def __init__(self, config: STMoEConfig) -> None:
        super().__init__(config)
        self.encoder = STMoEEncoder(config)
        self.decoder = Stack(config, decoder=True)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """Returns the token embedding [V, D], which encoder and decoder share."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the token embedding of encoder and decoder."""
        self.encoder.embed_tokens = cast(nn.Embedding, value)

    def get_encoder(self, modality: str | None = None) -> STMoEEncoder:
        """Returns the encoder; there is one for all modalities."""
        return self.encoder

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        decoder_segment_ids: Tensor | None = None,
        decoder_routing_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        encoder_outputs: STMoEEncoderOutput | tuple[Tensor, ...] | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        decoder_drop_tokens: bool = True,
    ) -> STMoEModelOutput:
        """Returns the decoder's hidden states; see `STMoEForConditionalGeneration.forward` for the arguments.

        Args as there, and:
            decoder_routing_mask: <bool>[B, T] decoder tokens that may be routed; None for the attention mask's.
        """
        wanted = self.config.output_router_logits if output_router_logits is None else output_router_logits
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds, segment_ids, wanted)
        memory: Tensor = cast(Any, encoder_outputs)[0]
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(), DynamicCache())
        hidden, decoder_routers = self.decoder(
            embed(self.encoder.embed_tokens, decoder_input_ids, decoder_inputs_embeds),
            token_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            segment_ids=decoder_segment_ids,
            routing_mask=decoder_routing_mask,
            memory=memory,
            memory_mask=attention_mask,
            memory_segment_ids=segment_ids,
            cache=past_key_values,
            drop_tokens=decoder_drop_tokens and past_key_values is None,
            report=wanted,
        )
        return STMoEModelOutput(
            last_hidden_state=hidden,
            past_key_values=past_key_values,
            encoder_last_hidden_state=memory,
            encoder_router_outputs=getattr(encoder_outputs, "encoder_router_outputs", None),
            decoder_router_outputs=decoder_routers if wanted else None,
        )


class STMoEForConditionalGeneration(STMoEPreTrainedModel, GenerationMixin):
    """The sequence-to-sequence model: trains with labels, generates without.

    Example:
        model = STMoEForConditionalGeneration.from_pretrained(run_dir)
        loss = model(input_ids, attention_mask, labels=labels).loss
        tokens = model.generate(input_ids, attention_mask=attention_mask, max_new_tokens=20)
    """

    _tied_weights_keys = {"lm_head.weight": "model.encoder.embed_tokens.weight"}
    accepts_loss_kwargs = True  # transformers' Trainer then gives num_items_in_batch and divides no loss itself

    def __init__(self, config: STMoEConfig) -> None:
        super().__init__(config)
        self.model = STMoEModel(config)
        std = math.sqrt(config.initializer_scale / config.d_model)
        self.lm_head = Projection(config.d_model, config.vocab_size, std=std, truncated=True)
        self.post_init()

    def get_encoder(self, modality: str | None = None) -> STMoEEncoder:
        """Returns the encoder; there is one for all modalities."""
        return self.model.encoder

    def prepare_decoder_input_ids_from_labels(
        self, labels: Tensor, decoder_segment_ids: Tensor | None = None
    ) -> Tensor:
        """Returns labels <int64>[B, T] shifted right by one, each segment starting with decoder_start_token_id."""
        shifted = labels.roll(1, dims=-1).masked_fill(labels.roll(1, dims=-1) == -100, self.config.pad_token_id)
        starts = torch.zeros_like(labels, dtype=torch.bool)
        starts[:, 0] = True
        if decoder_segment_ids is not None:
            starts = starts | (decoder_segment_ids != decoder_segment_ids.roll(1, dims=-1))
        return shifted.masked_fill(starts, self.config.decoder_start_token_id)

    def sparse_layers(self) -> tuple[SparseFeedForward, ...]:
        """Returns the sparse layers in the order of the router outputs, the encoder's first."""
        stacks = (self.model.encoder.stack, self.model.decoder)
        blocks = (cast(Block, block) for stack in stacks for block in stack.blocks)
        return tuple(block.sparse_feed_forward for block in blocks if block.sparse)

    def loss_counts(self, batch: dict[str, Tensor]) -> LossCounts:
        """Returns the divisors of the losses of a whole batch, for `forward(..., loss_counts=)` on its parts.

        Args:
            batch: Keyword arguments of `forward`: `input_ids` and `labels`, and masks or segment ids.
        """
        labels = batch["labels"]
        encoder_mask = batch.get("attention_mask", batch.get("segment_ids"))
        if encoder_mask is None:
            encoder_mask = torch.ones(batch["input_ids"].shape[:2], device=labels.device)
        decoder_mask = batch.get("decoder_attention_mask", labels != -100)
        return count_losses(self.config, encoder_mask != 0, decoder_mask != 0, labels)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        segment_ids: Tensor | None = None,
        decoder_segment_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        encoder_outputs: STMoEEncoderOutput | tuple[Tensor, ...] | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        decoder_drop_tokens: bool = True,
        loss_counts: LossCounts | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> STMoEOutput:
        """Returns logits, and the losses when there are labels.

        Args:
            input_ids: <int64>[B, L], or give `inputs_embeds` or `encoder_outputs`.
            attention_mask: <int64 or bool>[B, L], 0 for padding; padding is never attended to and never routed.
            decoder_input_ids: <int64>[B, T]; made of `labels` when not given.
            decoder_attention_mask: <int64 or bool>[B, T], with a cache [B, past + T].
            labels: <int64>[B, T] target tokens, -100 for none. Not shifted.
            segment_ids: <int64>[B, L] number of the packed example, 0 for padding; examples do not see each other.
            decoder_segment_ids: <int64>[B, T] the same for the decoder.
            inputs_embeds: <float>[B, L, D] in place of `input_ids`.
            decoder_inputs_embeds: <float>[B, T, D] in place of `decoder_input_ids`.
            encoder_outputs: Output of the encoder, whose run is then spared.
            past_key_values: Cache of earlier steps; the decoder then drops no token.
            use_cache: Whether to return a cache.
            output_router_logits: Whether to return what the routers did; None for the config's choice. The losses
                of the routers count either way.
            decoder_drop_tokens: False lets no token of the decoder be dropped, as `generate` does, with a cache or
                without.
            loss_counts: Divisors of the losses; None for those of this batch.
            num_items_in_batch: Targets of the whole batch that this is a part of, as transformers' Trainer counts
                them; see `model_losses`. In place of `loss_counts`.

        Raises:
            DataError: When neither inputs nor outputs of the encoder, or neither decoder inputs nor labels, are given.
            ConfigError: When the Trainer took the labels of a training step away; see `refuse_missing_labels`.
        """
        if labels is None and num_items_in_batch is not None and self.training:
            refuse_missing_labels(self.config)
        if loss_counts is not None and num_items_in_batch is not None:
            raise DataError(
                "loss_counts and num_items_in_batch were both given, and both say what the losses are divided by. "
                "Leave one of them out."
            )
        routing_mask = None
        wanted = self.config.output_router_logits if output_router_logits is None else output_router_logits
        if labels is not None:
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels, decoder_segment_ids)
            if decoder_attention_mask is None:
                routing_mask = labels != -100
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            segment_ids=segment_ids,
            decoder_segment_ids=decoder_segment_ids,
            decoder_routing_mask=routing_mask,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_router_logits=wanted or labels is not None,
            decoder_drop_tokens=decoder_drop_tokens,
        )
        hidden = outputs.last_hidden_state
        if self.config.tie_word_embeddings:
            hidden = hidden * self.config.d_model**-0.5
        logits = self.lm_head(hidden)
        result = STMoEOutput(
            logits=logits,
            past_key_values=outputs.past_key_values,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
        )
        encoder_routers = outputs.encoder_router_outputs or ()
        decoder_routers = outputs.decoder_router_outputs or ()
        if loss_counts is not None and loss_counts.balance_totals is not None:
            totals = iter(loss_counts.balance_totals)
            encoder_routers, decoder_routers = (
                tuple(router.within(next(totals)) for router in routers)
                for routers in (encoder_routers, decoder_routers)
            )
        if labels is not None:
            divisors = loss_counts
            if num_items_in_batch is not None:
                divisors = torch.as_tensor(num_items_in_batch, device=labels.device).reshape(())
            if divisors is None:
                batch = {"input_ids": result.encoder_last_hidden_state, "labels": labels}
                masks = {
                    "attention_mask": attention_mask,
                    "segment_ids": segment_ids,
                    "decoder_attention_mask": decoder_attention_mask,
                }
                batch.update({name: mask for name, mask in masks.items() if mask is not None})
                divisors = self.loss_counts(batch)
            smoothing = self.config.label_smoothing if self.training else 0.0
            losses = model_losses(self.config, logits, labels, encoder_routers, decoder_routers, divisors, smoothing)
            result.loss, result.ce_loss, result.z_loss, result.load_balance_loss, result.router_z_loss = losses
        if wanted:
            result.encoder_router_outputs, result.decoder_router_outputs = encoder_routers, decoder_routers
        return result

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns the arguments of a decoding step.

        Generation drops no token of the decoder, cached or not, and says what the routers did only when asked to.
        """
        inputs = cast(Any, super()).prepare_inputs_for_generation(*args, **kwargs)
        return {"output_router_logits": False, **inputs, "decoder_drop_tokens": False}


def embed(embedding: nn.Embedding, ids: Tensor | None, vectors: Tensor | None) -> Tensor:
    """Returns <float>[B, L, D]: the vectors, or the embedding of <int64>[B, L].

    Raises:
        DataError: When not exactly one of both is given.
    """
    if (ids is None) == (vectors is None):
        given = "neither" if ids is None else "both"
        raise DataError(
            f"Exactly one of token ids and embeddings is needed, but {given} were given. Pass input_ids or "
            "inputs_embeds, and for the decoder labels, decoder_input_ids or decoder_inputs_embeds."
        )
    return embedding(ids) if vectors is None else vectors
