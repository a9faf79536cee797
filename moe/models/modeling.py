"""The model classes: encoder-decoder with sparse layers as transformers expects them."""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin
from transformers.utils.generic import can_return_tuple

from moe.errors import ConfigError, DataError
from moe.models.attention import Projection
from moe.models.blocks import Block, Stack
from moe.models.configuration import STMoEConfig
from moe.models.drops import may_drop, warn_of_drops
from moe.models.encoder import STMoEEncoder, embed
from moe.models.losses import LossCounts, count_losses, model_losses, refuse_missing_labels
from moe.models.outputs import STMoEEncoderOutput, STMoEModelOutput, STMoEOutput, by_sequence
from moe.models.pretrained import STMoEPreTrainedModel
from moe.sparse.layer import SparseFeedForward


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
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        decoder_drop_tokens: bool = True,
    ) -> STMoEModelOutput:
        """Returns the decoder's hidden states; see `STMoEForConditionalGeneration.forward` for the arguments.

        Args as there, and:
            decoder_routing_mask: <bool>[B, T] decoder tokens that may be routed; None for the attention mask's.

        Raises:
            ConfigError: When a cache is to be used with activation checkpointing in training.
        """
        checkpointed = self.training and cast(Block, self.decoder.blocks[0]).gradient_checkpointing
        if checkpointed and (use_cache or past_key_values is not None):
            raise ConfigError(
                "A cache cannot be used with activation checkpointing in training: the second forward pass of a block "
                "would extend it again. Call model.eval(), pass use_cache=False, or switch checkpointing off."
            )
        output_router_logits = self.chosen("output_router_logits", output_router_logits)
        output_attentions = self.chosen("output_attentions", output_attentions)
        output_hidden_states = self.chosen("output_hidden_states", output_hidden_states)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids,
                attention_mask,
                inputs_embeds,
                segment_ids,
                output_router_logits=output_router_logits,
                output_attentions=output_attentions,
                output_hidden_states=output_hidden_states,
                return_dict=True,
            )
        elif isinstance(encoder_outputs, tuple):
            encoder_outputs = STMoEEncoderOutput(encoder_outputs[0])
        memory: Tensor = cast(Any, encoder_outputs).last_hidden_state
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(), DynamicCache())
        drop_tokens = decoder_drop_tokens and past_key_values is None
        watched = drop_tokens and may_drop(self)
        decoder = self.decoder(
            embed(self.encoder.embed_tokens, decoder_input_ids, decoder_inputs_embeds),
            token_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            segment_ids=decoder_segment_ids,
            routing_mask=decoder_routing_mask,
            memory=memory,
            memory_mask=attention_mask,
            memory_segment_ids=segment_ids,
            cache=past_key_values,
            drop_tokens=drop_tokens,
            report=output_router_logits or watched,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        if watched:
            warn_of_drops(self.encoder, self.config, "decoder", decoder.routers)
        decoder_routers = decoder.routers if output_router_logits else None
        return STMoEModelOutput(
            last_hidden_state=decoder.hidden,
            past_key_values=past_key_values,
            decoder_hidden_states=decoder.hidden_states,
            decoder_attentions=decoder.attentions,
            cross_attentions=decoder.cross_attentions,
            encoder_last_hidden_state=memory,
            encoder_hidden_states=getattr(encoder_outputs, "hidden_states", None),
            encoder_attentions=getattr(encoder_outputs, "attentions", None),
            encoder_router_logits=getattr(encoder_outputs, "encoder_router_logits", None),
            decoder_router_logits=by_sequence(decoder_routers, memory.shape[0]),
            encoder_router_outputs=getattr(encoder_outputs, "encoder_router_outputs", None),
            decoder_router_outputs=decoder_routers,
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

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replaces the head; one that transformers resized stays a Projection, which a mesh can cut."""
        if type(new_embeddings) is nn.Linear:
            self.lm_head.weight, self.lm_head.out_features = new_embeddings.weight, new_embeddings.out_features
        else:
            self.lm_head = cast(Projection, new_embeddings)

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
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        decoder_drop_tokens: bool = True,
        loss_counts: LossCounts | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> STMoEOutput:
        """Returns logits, and the losses when there are labels.

        Args:
            input_ids: <int64>[B, L], or give `inputs_embeds` or `encoder_outputs`.
            attention_mask: <int64 or bool>[B, L], 0 for padding; padding is never attended to and never routed.
            decoder_input_ids: <int64>[B, T]; made of `labels` when not given.
            decoder_attention_mask: <int64 or bool>[B, T], with a cache [B, past + T], with a static one [B, its size].
            labels: <int64>[B, T] target tokens, -100 for none. Not shifted.
            segment_ids: <int64>[B, L] number of the packed example, 0 for padding; examples do not see each other.
            decoder_segment_ids: <int64>[B, T] the same for the decoder.
            inputs_embeds: <float>[B, L, D] in place of `input_ids`.
            decoder_inputs_embeds: <float>[B, T, D] in place of `decoder_input_ids`.
            encoder_outputs: Output of the encoder, whose run is then spared; of a tuple only the first is read.
            past_key_values: Cache of earlier steps; the decoder then drops no token.
            use_cache: Whether to return a cache.
            output_router_logits: Whether to return what the routers did; None for the config's choice. The losses
                of the routers count either way.
            output_attentions: Whether to return the weights of attention, which is then eager; None likewise.
            output_hidden_states: Whether to return the hidden states of every layer; None likewise.
            decoder_drop_tokens: False lets no token of the decoder be dropped, as `generate` does, with a cache or
                without.
            loss_counts: Divisors of the losses; None for those of this batch.
            num_items_in_batch: Targets of the whole batch that this is a part of, as transformers' Trainer counts
                them; see `model_losses`. In place of `loss_counts`.

        Raises:
            DataError: When neither inputs nor outputs of the encoder, or neither decoder inputs nor labels, are given.
            ConfigError: When the model is a replica of torch.nn.DataParallel, or the Trainer took the labels of a
                training step away; see `refuse_missing_labels`.
        """
        if getattr(self, "_is_replica", False):
            raise ConfigError(
                "torch.nn.DataParallel cannot join what the routers of its replicas did. Start one process for each "
                "device with torchrun or accelerate, or show the process one device with CUDA_VISIBLE_DEVICES."
            )
        if labels is None and num_items_in_batch is not None and self.training:
            refuse_missing_labels(self.config, decoder_masked=decoder_attention_mask is not None)
        if loss_counts is not None and num_items_in_batch is not None:
            raise DataError(
                "loss_counts and num_items_in_batch were both given, and both say what the losses are divided by. "
                "Leave one of them out."
            )
        output_router_logits = self.chosen("output_router_logits", output_router_logits)
        routing_mask = None
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
            output_router_logits=output_router_logits or labels is not None,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            decoder_drop_tokens=decoder_drop_tokens,
            return_dict=True,
        )
        hidden = outputs.last_hidden_state
        if self.config.tie_word_embeddings:
            hidden = hidden * self.config.d_model**-0.5
        logits = self.lm_head(hidden)
        result = STMoEOutput(
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
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
        if output_router_logits:
            result.encoder_router_logits, result.decoder_router_logits = (
                outputs.encoder_router_logits,
                outputs.decoder_router_logits,
            )
            result.encoder_router_outputs, result.decoder_router_outputs = encoder_routers, decoder_routers
        return result if labels is None else STMoEOutput(**result)  # the losses in their place, for return_dict=False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Returns generated tokens, or transformers' record of them; arguments and results are its own.

        Raises:
            ConfigError: When the routers' logits are asked for, which that record has no place for.
        """
        if kwargs.setdefault("output_router_logits", False):
            raise ConfigError(
                "generate() has no place to return output_router_logits in. Leave it out, and give the generated "
                "tokens to the model as decoder_input_ids, with decoder_drop_tokens=False, to see how they are routed."
            )
        return cast(Any, super()).generate(*args, **kwargs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns the arguments of a decoding step; generation drops no token of the decoder, cached or not."""
        inputs = cast(Any, super()).prepare_inputs_for_generation(*args, **kwargs)
        return {**inputs, "decoder_drop_tokens": False}

    @staticmethod
    def create_masks_for_generate(
        *, attention_mask: Tensor | None, past_key_values: EncoderDecoderCache, **_: Any
    ) -> Tensor | None:
        """Returns the decoder's mask <int64 or bool>[B, keys] for all places of a static cache; the model does more.

        Args:
            attention_mask: <int64 or bool>[B, past + T], if there is one.
            past_key_values: A cache whose size is fixed.
        """
        if attention_mask is None:
            return None
        return F.pad(attention_mask, (0, past_key_values.get_max_length() - attention_mask.shape[1]))
