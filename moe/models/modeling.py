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
from moe.models.drop_warning import may_drop, warn_of_drops
from moe.models.encoder import STMoEEncoder
from moe.models.inputs import (
    IGNORED_LABEL,
    as_cache,
    check_labels,
    check_logits_to_keep,
    check_num_items,
    check_same_batch,
    check_segments,
    check_targets,
    check_vectors,
    read_memory,
    refuse_further,
)
from moe.models.losses import LossCounts, count_losses, model_losses, refuse_missing_labels
from moe.models.outputs import (
    RouterRecords,
    STMoEEncoderOutput,
    STMoEModelOutput,
    STMoEOutput,
    by_sequence,
)
from moe.models.pretrained import STMoEPreTrainedModel
from moe.sparse.layer import SparseFeedForward

_LOSSES = (
    "loss",
    "ce_loss",
    "z_loss",
    "load_balance_loss",
    "router_z_loss",
)  # names of `Losses` in the output

_OF_GENERATION = (
    "tokenizer",
    "assistant_tokenizer",
)  # arguments of `generate` that no step of it needs


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
        *,
        return_dict: bool | None = None,
        **further: Any,
    ) -> STMoEModelOutput:
        """Returns the decoder's hidden states; see `STMoEForConditionalGeneration.forward` for the
        arguments.

        Args as there, and:
            decoder_routing_mask: <bool>[B, T] decoder tokens that may be routed; None for the
            attention mask's.

        Raises:
            ConfigError: When a cache is to be used with activation checkpointing in training, or an
                argument is unknown.
            DataError: When an input has another type or shape, or values that nothing stands for.
        """
        refuse_further(further, type(self).forward)
        past_key_values = as_cache(past_key_values)
        checkpointed = self.training and cast(Block, self.decoder.blocks[0]).gradient_checkpointing
        if checkpointed and (use_cache or past_key_values is not None):
            raise ConfigError(
                "A cache cannot be used with activation checkpointing in training: the second forward pass of a block "
                "would extend it again. Call model.eval(), pass use_cache=False, or switch checkpointing off."
            )
        output_router_logits = self.chosen("output_router_logits", output_router_logits)
        output_attentions = self.chosen("output_attentions", output_attentions)
        output_hidden_states = self.chosen("output_hidden_states", output_hidden_states)
        embedded = self.encoder.embed(decoder_input_ids, decoder_inputs_embeds, prefix="decoder_")
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
        memory = read_memory(encoder_outputs)
        check_vectors("encoder_outputs", memory, self.config.d_model)
        check_same_batch(embedded, memory)

        # A cache that was asked for is one to decode with, and drops no token; the config's own
        # wish for one lets the same call route as it would without.
        drop_tokens = decoder_drop_tokens and not use_cache and past_key_values is None
        if use_cache is None:
            use_cache = (
                self.config.use_cache and not self.training and not torch.compiler.is_exporting()
            )
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(), DynamicCache())

        watched = drop_tokens and may_drop(self)
        decoder = self.decoder(
            embedded,
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
        decoder_routers = (
            RouterRecords(decoder.routers) if output_router_logits and decoder.routers else None
        )
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
            decoder_router_logits=by_sequence(decoder_routers, embedded.shape[0]),
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
    accepts_loss_kwargs = (
        True  # transformers' Trainer then gives num_items_in_batch and divides no loss itself
    )

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
        """Replaces the head; one that transformers resized stays a Projection, which a mesh can
        cut.
        """
        if type(new_embeddings) is nn.Linear:
            self.lm_head.weight, self.lm_head.out_features = (
                new_embeddings.weight,
                new_embeddings.out_features,
            )
        else:
            self.lm_head = cast(Projection, new_embeddings)

    def prepare_decoder_input_ids_from_labels(
        self, labels: Tensor, decoder_segment_ids: Tensor | None = None
    ) -> Tensor:
        """Returns labels <int64>[B, T] shifted right by one, each segment starting with
        decoder_start_token_id.

        Raises:
            DataError: When these are no labels.
        """
        check_labels(labels, self.config.vocab_size)
        return self._shifted_right(labels, decoder_segment_ids)

    def _shifted_right(self, labels: Tensor, decoder_segment_ids: Tensor | None) -> Tensor:
        """Returns the decoder's inputs of labels that are known to be labels; see the method above."""
        check_segments(
            "decoder_segment_ids", decoder_segment_ids, (labels.shape[0], labels.shape[1])
        )
        shifted = labels.roll(1, dims=-1)
        shifted = shifted.masked_fill(shifted == IGNORED_LABEL, self.config.pad_token_id)
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
        """Returns the divisors of the losses of a whole batch, for `forward(..., loss_counts=)` on
        its parts.

        Args:
            batch: Keyword arguments of `forward`: `input_ids` and `labels`, and masks or segment
                ids.
        """
        labels = batch["labels"]
        inputs = batch["input_ids"]
        encoder_mask = batch.get("attention_mask", batch.get("segment_ids"))
        if encoder_mask is None:
            encoder_mask = torch.ones(inputs.shape[:2], device=labels.device)
        encoder_mask = (encoder_mask != 0).expand(inputs.shape[:2])
        decoder_mask = batch.get("decoder_attention_mask", labels != IGNORED_LABEL)
        decoder_mask = (decoder_mask != 0).expand(labels.shape)
        return count_losses(self.config, encoder_mask, decoder_mask, labels)

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
        logits_to_keep: int | Tensor = 0,
        *,
        return_dict: bool | None = None,
        **further: Any,
    ) -> STMoEOutput:
        """Returns logits, and the losses when there are labels.

        Args:
            input_ids: <int64>[B, L], or give `inputs_embeds` or `encoder_outputs`.
            attention_mask: <int64 or bool>[B, L], 0 for padding; padding is never attended to and
                never routed.
            decoder_input_ids: <int64>[B, T]; made of `labels` when not given.
            decoder_attention_mask: <int64 or bool>[B, T], with a cache [B, past + T], with a static
                one [B, its size].
            labels: <int64>[B, T] target tokens, -100 for none. Not shifted.
            segment_ids: <int64>[B, L] number of the packed example, 0 for padding; examples do not
                see each other.
            decoder_segment_ids: <int64>[B, T] the same for the decoder.
            inputs_embeds: <float>[B, L, D] in place of `input_ids`.
            decoder_inputs_embeds: <float>[B, T, D] in place of `decoder_input_ids`.
            encoder_outputs: Output of the encoder, whose run is then spared; of a tuple only the
                first is read.
            past_key_values: Cache of earlier steps; the decoder then drops no token.
            use_cache: Whether to return a cache, with which the decoder drops no token. None for
                the config's choice in evaluation mode, and none in training mode or in
                torch.export; that cache changes no routing of this call.
            output_router_logits: Whether to return what the routers did; None for the config's
                choice. The losses of the routers count either way.
            output_attentions: Whether to return the weights of attention, which is then eager; None
                likewise.
            output_hidden_states: Whether to return the hidden states of every layer; None likewise.
            decoder_drop_tokens: False lets no token of the decoder be dropped, as `generate` does,
                with a cache or without.
            loss_counts: Divisors of the losses; None for those of this batch.
            num_items_in_batch: Targets of the whole batch that this is a part of, as transformers'
                Trainer counts them; see `model_losses`. In place of `loss_counts`.
            logits_to_keep: Number of last positions whose logits are returned, 0 for all, or
                <int64>[positions] their indices; without labels.
            return_dict: False for a tuple of what is there; None for the config's choice.
            further: None: an argument of another name is refused, but for those that change nothing
                here.

        Raises:
            DataError: When neither inputs nor outputs of the encoder, or neither decoder inputs nor
                labels, are given; when one has another type or shape, or values that nothing stands
                for.
            ConfigError: When the model is a replica of torch.nn.DataParallel, or the Trainer took
                the labels of a training step away (see `refuse_missing_labels`), or an argument is
                unknown.
        """
        refuse_further(further, type(self).forward)
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
        check_logits_to_keep(logits_to_keep, labels)
        reported = self.chosen("output_router_logits", output_router_logits)

        # Labels make the decoder's inputs and say which of them are padding, unless something else
        # does.
        divisors: LossCounts | Tensor | None = loss_counts
        routing_mask = None
        if labels is not None:
            check_labels(labels, self.config.vocab_size)
            if num_items_in_batch is not None:
                divisors = check_num_items(num_items_in_batch, labels)
            decoder_inputs = (
                decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds
            )
            if decoder_inputs is None:
                decoder_input_ids = self._shifted_right(labels, decoder_segment_ids)
            else:
                check_targets(labels, decoder_inputs)
            if decoder_attention_mask is None:
                routing_mask = labels != IGNORED_LABEL

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
            output_router_logits=reported or labels is not None,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            decoder_drop_tokens=decoder_drop_tokens,
            return_dict=True,
        )

        hidden = outputs.last_hidden_state
        if isinstance(logits_to_keep, Tensor):
            hidden = hidden[:, logits_to_keep]
        elif logits_to_keep:
            hidden = hidden[:, -logits_to_keep:]
        if self.config.tie_word_embeddings:
            hidden = hidden * self.config.d_model**-0.5
        logits = self.lm_head(hidden)

        encoder_routers = tuple(outputs.encoder_router_outputs or ())
        decoder_routers = tuple(outputs.decoder_router_outputs or ())
        if loss_counts is not None and loss_counts.balance_totals is not None:
            totals = iter(loss_counts.balance_totals)
            encoder_routers = tuple(router.within(next(totals)) for router in encoder_routers)
            decoder_routers = tuple(router.within(next(totals)) for router in decoder_routers)

        losses = dict.fromkeys(_LOSSES)
        if labels is not None:
            if divisors is None:
                batch = {
                    "input_ids": outputs.encoder_last_hidden_state,
                    "labels": labels,
                    "attention_mask": attention_mask,
                    "segment_ids": segment_ids,
                    "decoder_attention_mask": decoder_attention_mask,
                }
                divisors = self.loss_counts(
                    {name: value for name, value in batch.items() if value is not None}
                )
            smoothing = self.config.label_smoothing if self.training else 0.0
            parts = model_losses(
                self.config, logits, labels, encoder_routers, decoder_routers, divisors, smoothing
            )
            losses = dict(zip(_LOSSES, parts, strict=True))

        return STMoEOutput(
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
            encoder_router_logits=outputs.encoder_router_logits if reported else None,
            decoder_router_logits=outputs.decoder_router_logits if reported else None,
            encoder_router_outputs=RouterRecords(encoder_routers)
            if reported and encoder_routers
            else None,
            decoder_router_outputs=RouterRecords(decoder_routers)
            if reported and decoder_routers
            else None,
            **losses,
        )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Returns generated tokens, or transformers' record of them; arguments and results are its
        own.

        Raises:
            ConfigError: When the routers' logits are asked for, which that record has no place for,
                or token healing, which is for decoders alone.
        """
        settings = kwargs.get("generation_config") or self.generation_config
        if kwargs.get("token_healing", getattr(settings, "token_healing", False)):
            raise ConfigError(
                "token_healing is True, but transformers heals the prompts of decoders alone: it needs a "
                "tokenizer with a token for the beginning of a text, which encoder-decoders lack. Leave it out."
            )
        if kwargs.setdefault("output_router_logits", False):
            raise ConfigError(
                "generate() has no place to return output_router_logits in. Leave it out, and give the generated "
                "tokens to the model as decoder_input_ids, with decoder_drop_tokens=False, to see how they are routed."
            )
        return cast(Any, super()).generate(*args, **kwargs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns the arguments of a decoding step; generation drops no token of the decoder,
        cached or not.

        transformers hands all that `generate` was given on to the model, tokenizers for stop
        strings among it.
        """
        for name in _OF_GENERATION:
            kwargs.pop(name, None)
        inputs = cast(Any, super()).prepare_inputs_for_generation(*args, **kwargs)
        return {**inputs, "decoder_drop_tokens": False}

    @staticmethod
    def create_masks_for_generate(
        *, attention_mask: Tensor | None, past_key_values: EncoderDecoderCache, **_: Any
    ) -> Tensor | None:
        """Returns the decoder's mask <int64 or bool>[B, keys] for all places of a static cache; the
        model does more.

        Args:
            attention_mask: <int64 or bool>[B, past + T], if there is one.
            past_key_values: A cache whose size is fixed.
        """
        if attention_mask is None:
            return None
        return F.pad(
            attention_mask, (0, past_key_values.get_max_length() - attention_mask.shape[1])
        )
