"""The model classes: encoder-decoder with sparse layers as transformers expects them."""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    GenerationMixin,
)
from transformers.utils.generic import can_return_tuple

from moe.checks import check
from moe.distributed.mesh import Mesh
from moe.distributed.sharding import refuse_loss_of_a_rank
from moe.errors import ConfigError
from moe.kernels.torch_private import is_exporting
from moe.models.attention import Projection
from moe.models.blocks import Block, Stack
from moe.models.configuration import STMoEConfig
from moe.models.encoder import STMoEEncoder
from moe.models.inputs import (
    IGNORED_LABEL,
    check_segments,
    check_token_ids,
    check_vectors,
    encoder_decoder_cache,
    encoder_hidden_states,
    pad_decoder_mask,
    refuse_unknown_arguments,
)
from moe.models.losses import LossCounts, count_losses, model_losses, refuse_missing_labels
from moe.models.model_warnings import can_drop_tokens, warn_of_drops
from moe.models.outputs import (
    RouterRecords,
    STMoEEncoderOutput,
    STMoEModelOutput,
    STMoEOutput,
    logits_by_sequence,
)
from moe.models.pretrained import STMoEPreTrainedModel
from moe.sparse.layer import RouterOutput, SparseFeedForward
from moe.sparse.losses import BalanceTotals

_ARGUMENTS_OF_GENERATE = ("tokenizer", "assistant_tokenizer")
"""Arguments of `generate` that no step of it needs."""


class STMoEModel(STMoEPreTrainedModel):
    """Encoder and decoder without a head."""

    _keys_to_ignore_on_load_unexpected = [r"lm_head\."]

    def __init__(self, config: STMoEConfig) -> None:
        super().__init__(config)
        check(
            config.is_encoder_decoder,
            "is_encoder_decoder",
            config.is_encoder_decoder,
            "true; STMoEEncoderModel is the encoder alone",
        )
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
        """Returns the decoder's hidden states; see `STMoEForConditionalGeneration.forward`.

        Args as there, and:
            decoder_routing_mask: <bool>[B, T] decoder tokens that may be routed; None for the
            attention mask's.

        Raises:
            ConfigError: When a cache is to be used with activation checkpointing in training, or an
                argument is unknown.
            DataError: When an input has another type, shape or range of values.
        """
        # Requested outputs; None uses the config.
        refuse_unknown_arguments(further, type(self).forward)
        past_key_values = encoder_decoder_cache(past_key_values)
        self._refuse_cache_of_checkpointing(use_cache or past_key_values is not None)
        output_routers = self.argument_or_config("output_router_logits", output_router_logits)
        output_attentions = self.argument_or_config("output_attentions", output_attentions)
        output_hidden_states = self.argument_or_config("output_hidden_states", output_hidden_states)

        # A mask that ends early says that the rest is padding. With a cache, the rest would be the
        # tokens of this call.
        embedded = self.encoder.embed(decoder_input_ids, decoder_inputs_embeds, prefix="decoder_")
        if past_key_values is None:
            decoder_attention_mask = pad_decoder_mask(decoder_attention_mask, embedded.shape[1])

        # The encoder, unless its output was given.
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids,
                attention_mask,
                inputs_embeds,
                segment_ids,
                output_router_logits=output_routers,
                output_attentions=output_attentions,
                output_hidden_states=output_hidden_states,
                return_dict=True,
            )
        memory = encoder_hidden_states(encoder_outputs)  # [B, L, D]
        check_vectors("encoder_outputs", memory, self.config.d_model)

        # A requested cache means decoding, which drops no token. A cache enabled only by the config
        # does not change the routing of this call.
        drop_tokens = decoder_drop_tokens and not use_cache and past_key_values is None
        if use_cache is None:
            outside_training = not self.training and not is_exporting()
            use_cache = self.config.use_cache and outside_training
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(), DynamicCache())

        # The decoder. Its routers also report for the warning of drops.
        watch_drops = drop_tokens and can_drop_tokens(self)
        decoder = self.decoder(
            embedded,
            token_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            segment_ids=decoder_segment_ids,
            routing_mask=decoder_routing_mask,
            memory=memory,
            memory_mask=attention_mask,
            memory_segment_ids=segment_ids,
            memory_prefixes=getattr(encoder_outputs, "prefix_numbers", None),
            cache=past_key_values,
            drop_tokens=drop_tokens,
            report=output_routers or watch_drops,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        if watch_drops:
            warn_of_drops(self.encoder, self.config, self.decoder, decoder.routers)

        # An encoder that did not run here may have left its records in its output.
        decoder_routers = None
        if output_routers and decoder.routers:
            decoder_routers = RouterRecords(decoder.routers)
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
            decoder_router_logits=logits_by_sequence(decoder_routers, embedded.shape[0]),
            encoder_router_outputs=getattr(encoder_outputs, "encoder_router_outputs", None),
            decoder_router_outputs=decoder_routers,
        )

    def _refuse_cache_of_checkpointing(self, cache_is_wanted: bool | None) -> None:
        """Raises a ConfigError if a cache would be extended twice."""
        checkpointed = cast(Block, self.decoder.blocks[0]).gradient_checkpointing
        if cache_is_wanted and self.training and checkpointed:
            raise ConfigError(
                "A cache cannot be used with activation checkpointing in training: the second "
                "forward pass of a block would extend it again. Call model.eval(), pass "
                "use_cache=False, or switch checkpointing off."
            )


class STMoEForConditionalGeneration(STMoEPreTrainedModel, GenerationMixin):
    """The sequence-to-sequence model: trains with labels, generates without.

    Example:
        model = STMoEForConditionalGeneration.from_pretrained(run_dir)
        loss = model(input_ids, attention_mask, labels=labels).loss
        tokens = model.generate(input_ids, attention_mask=attention_mask, max_new_tokens=20)
    """

    _tied_weights_keys = {"lm_head.weight": "model.encoder.embed_tokens.weight"}

    # transformers' Trainer then gives num_items_in_batch and divides no loss itself.
    accepts_loss_kwargs = True

    def __init__(self, config: STMoEConfig) -> None:
        super().__init__(config)
        self.model = STMoEModel(config)

        # The head draws its weights like the projections of the blocks.
        std = math.sqrt(config.initializer_scale / config.d_model)
        self.lm_head = Projection(config.d_model, config.vocab_size, std=std, truncated=True)
        self.post_init()

    def get_encoder(self, modality: str | None = None) -> STMoEEncoder:
        """Returns the encoder; there is one for all modalities."""
        return self.model.encoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replaces the head."""
        # One that transformers resized stays a Projection, which a mesh can shard.
        if type(new_embeddings) is nn.Linear:
            self.lm_head.weight = new_embeddings.weight
            self.lm_head.out_features = new_embeddings.out_features
        else:
            self.lm_head = cast(Projection, new_embeddings)

    def prepare_decoder_input_ids_from_labels(
        self, labels: Tensor, decoder_segment_ids: Tensor | None = None
    ) -> Tensor:
        """Returns labels <int64>[B, T] shifted right by one, as inputs of the decoder.

        Each segment starts with decoder_start_token_id.

        Raises:
            DataError: When the labels are invalid.
        """
        check_token_ids("labels", labels, self.config.vocab_size, ignored=IGNORED_LABEL)
        return self._shift_right(labels, decoder_segment_ids)

    def _shift_right(self, labels: Tensor, decoder_segment_ids: Tensor | None) -> Tensor:
        """Returns the decoder's inputs <int64>[B, T] from validated labels <int64>[B, T]."""
        shape = (labels.shape[0], labels.shape[1])
        check_segments("decoder_segment_ids", decoder_segment_ids, shape)

        # A position without a target is padding as an input.
        shifted = labels.roll(1, dims=-1)
        shifted = shifted.masked_fill(shifted == IGNORED_LABEL, self.config.pad_token_id)

        # The first token of each segment has none before it.
        starts = torch.zeros_like(labels, dtype=torch.bool)
        starts[:, 0] = True
        if decoder_segment_ids is not None:
            starts = starts | (decoder_segment_ids != decoder_segment_ids.roll(1, dims=-1))
        return shifted.masked_fill(starts, self.config.decoder_start_token_id)

    def sparse_layers(self) -> tuple[SparseFeedForward, ...]:
        """Returns the sparse layers in the order of the router outputs, the encoder's first."""
        layers = []
        for stack in (self.model.encoder.stack, self.model.decoder):
            for module in stack.blocks:
                block = cast(Block, module)
                if block.sparse:
                    layers.append(block.sparse_feed_forward)
        return tuple(layers)

    def loss_counts(self, batch: dict[str, Tensor], mesh: Mesh | None = None) -> LossCounts:
        """Returns the divisors of the losses of a whole batch, for `forward` on its parts.

        Args:
            batch: Keyword arguments of `forward`: `input_ids` and `labels`, and masks or segment
                ids.
            mesh: Mesh over whose ranks the batch is split, all of which call this: each gives its
                rows. None when `batch` is all of it.

        Raises:
            ConfigError: When the balance loss is over tokens of several ranks: their choices would
                be needed as well, which only a recipe's run exchanges.
        """
        inputs = batch["input_ids"]
        labels = batch["labels"]

        # Padding has the mask 0, or the segment 0; without both there is none.
        encoder_mask = batch.get("attention_mask", batch.get("segment_ids"))
        if encoder_mask is None:
            encoder_mask = torch.ones(inputs.shape[:2], device=labels.device)

        # In the decoder a position without a target is padding, unless a mask says otherwise.
        decoder_mask = batch.get("decoder_attention_mask", labels != IGNORED_LABEL)
        decoder_mask = cast(Tensor, pad_decoder_mask(decoder_mask, labels.shape[1]))
        return count_losses(self.config, encoder_mask != 0, decoder_mask != 0, labels, mesh)

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
            decoder_input_ids: <int64>[B, T]; derived from `labels` if not given.
            decoder_attention_mask: <int64 or bool>[B, T], with a cache [B, past + T], with a static
                one [B, its size]. Without a cache it may be shorter: the tokens beyond its end are
                padding, as in transformers.
            labels: <int64>[B, T] target tokens, -100 for none. Not shifted.
            segment_ids: <int64>[B, L] number of the packed example, 0 for padding; examples do not
                see each other.
            decoder_segment_ids: <int64>[B, T] the same for the decoder.
            inputs_embeds: <float>[B, L, D] in place of `input_ids`.
            decoder_inputs_embeds: <float>[B, T, D] in place of `decoder_input_ids`.
            encoder_outputs: Output of the encoder, which then does not run; only the first element
                of a tuple is read.
            past_key_values: Cache of earlier steps; the decoder then drops no token.
            use_cache: Whether to return a cache, with which the decoder drops no token. None for
                the config's choice in evaluation mode, and no cache in training mode or in
                torch.export; such a cache does not change the routing of this call.
            output_router_logits: Whether to return the records of the routers; None for the
                config's choice. The losses of the routers count either way.
            output_attentions: Whether to return the weights of attention, which is then eager; None
                likewise.
            output_hidden_states: Whether to return the hidden states of every layer; None likewise.
            decoder_drop_tokens: False keeps all tokens of the decoder, as `generate` does, with a
                cache or without.
            loss_counts: Divisors of the losses; None uses those of this batch.
            num_items_in_batch: Targets of the whole batch that this is a part of, as transformers'
                Trainer counts them; see `model_losses`. In place of `loss_counts`.
            logits_to_keep: Number of last positions whose logits are returned, 0 for all, or
                <int64>[positions] their indices; without labels.
            return_dict: False for a tuple of the fields that are not None; None for the config's
                choice.
            further: Other arguments, which must have no effect.

        Raises:
            DataError: When neither inputs nor outputs of the encoder, or neither decoder inputs nor
                labels, are given; when one has another type, shape or range of values.
            ConfigError: When the model is a replica of torch.nn.DataParallel, or the Trainer took
                the labels of a training step away (see `refuse_missing_labels`), or an argument is
                unknown.
        """
        # Raise for calls that would not compute what the caller means.
        refuse_unknown_arguments(further, type(self).forward)
        self._refuse_replica()
        if labels is None and num_items_in_batch is not None and self.training:
            is_dense = not self.config.num_sparse_decoder_layers
            masked = decoder_attention_mask is not None or is_dense
            refuse_missing_labels(self.config, decoder_masked=masked)
        output_routers = self.argument_or_config("output_router_logits", output_router_logits)

        # Labels give the decoder's inputs and padding, unless other arguments do.
        divisors: LossCounts | Tensor | None = loss_counts
        routing_mask = None
        if labels is not None:
            check_token_ids("labels", labels, self.config.vocab_size, ignored=IGNORED_LABEL)
            if num_items_in_batch is not None:
                divisors = torch.as_tensor(num_items_in_batch, device=labels.device).reshape(())
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self._shift_right(labels, decoder_segment_ids)
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
            output_router_logits=output_routers or labels is not None,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            decoder_drop_tokens=decoder_drop_tokens,
            return_dict=True,
        )
        logits = self._vocabulary_logits(outputs.last_hidden_state, logits_to_keep)

        # Records of the routers; if the scope is wider than this call, losses follow from totals.
        encoder_routers = tuple(outputs.encoder_router_outputs or ())
        decoder_routers = tuple(outputs.decoder_router_outputs or ())
        if loss_counts is not None and loss_counts.balance_totals is not None:
            totals = loss_counts.balance_totals
            num_encoder_layers = len(encoder_routers)
            encoder_routers = _within(encoder_routers, totals[:num_encoder_layers])
            decoder_routers = _within(decoder_routers, totals[num_encoder_layers:])

        # Divided by the counts of this batch, unless counts of a larger batch were given.
        losses: dict[str, Any] = {}
        if labels is not None:
            if divisors is None:
                refuse_loss_of_a_rank(self)
                given = {
                    "attention_mask": attention_mask,
                    "segment_ids": segment_ids,
                    "decoder_attention_mask": decoder_attention_mask,
                }
                masks = {name: mask for name, mask in given.items() if mask is not None}
                encoded = outputs.encoder_last_hidden_state  # with the shape of the inputs
                divisors = self.loss_counts({"input_ids": encoded, "labels": labels, **masks})
            smoothing = self.config.label_smoothing if self.training else 0.0
            parts = model_losses(
                self.config, logits, labels, encoder_routers, decoder_routers, divisors, smoothing
            )
            losses = parts._asdict()
            losses["loss"] = losses.pop("total")

        # The losses need the routers' records; the output includes them only on request.
        router_fields: dict[str, Any] = {}
        if output_routers:
            router_fields = {
                "encoder_router_logits": outputs.encoder_router_logits,
                "decoder_router_logits": outputs.decoder_router_logits,
                "encoder_router_outputs": RouterRecords(encoder_routers) or None,
                "decoder_router_outputs": RouterRecords(decoder_routers) or None,
            }
        return STMoEOutput(
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
            **router_fields,
            **losses,
        )

    def _refuse_replica(self) -> None:
        """Raises a ConfigError for a replica of torch.nn.DataParallel."""
        if getattr(self, "_is_replica", False):
            raise ConfigError(
                "torch.nn.DataParallel cannot combine the router outputs of its replicas. Start one process for each "
                "device with torchrun or accelerate, or restrict the process to one device with CUDA_VISIBLE_DEVICES."
            )

    def _vocabulary_logits(self, hidden: Tensor, logits_to_keep: int | Tensor) -> Tensor:
        """Returns logits <float>[B, positions, V] of the decoder's output <float>[B, T, D]."""
        if isinstance(logits_to_keep, Tensor):
            hidden = hidden[:, logits_to_keep]
        elif logits_to_keep:
            hidden = hidden[:, -logits_to_keep:]

        if self.config.scale_decoder_outputs:
            hidden = hidden * self.config.d_model**-0.5
        return self.lm_head(hidden)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Returns generated tokens, or transformers' record of them, as in transformers.

        Raises:
            ConfigError: When the routers' logits are requested, which that record cannot hold.
        """
        if kwargs.setdefault("output_router_logits", False):
            raise ConfigError(
                "output_router_logits is not supported by generate(). Remove it; to see how the generated tokens are "
                "routed, pass them to the model as decoder_input_ids with decoder_drop_tokens=False."
            )
        return cast(Any, super()).generate(*args, **kwargs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns the arguments of a decoding step, which drops no token of the decoder.

        transformers passes all arguments of `generate` to the model, including tokenizers for stop
        strings.
        """
        for name in _ARGUMENTS_OF_GENERATE:
            kwargs.pop(name, None)
        inputs = cast(Any, super()).prepare_inputs_for_generation(*args, **kwargs)
        return {**inputs, "decoder_drop_tokens": False}

    @staticmethod
    def create_masks_for_generate(
        *, attention_mask: Tensor | None, past_key_values: EncoderDecoderCache, **_: Any
    ) -> Tensor | None:
        """Returns the decoder's mask <int64 or bool>[B, keys] for all positions of a static cache.

        The model adds causality and segments itself.

        Args:
            attention_mask: <int64 or bool>[B, past + T], if there is one.
            past_key_values: A cache whose size is fixed.
        """
        if attention_mask is None:
            return None
        num_free = past_key_values.get_max_length() - attention_mask.shape[1]
        return F.pad(attention_mask, (0, num_free))


def _within(
    routers: tuple[RouterOutput, ...], totals: tuple[BalanceTotals, ...]
) -> tuple[RouterOutput, ...]:
    """Returns the records, with the balance loss computed from the totals of the whole scope."""
    records = []
    for router, layer_totals in zip(routers, totals, strict=True):
        records.append(router.within(layer_totals))
    return tuple(records)


AutoModel.register(STMoEConfig, STMoEModel)
AutoModelForSeq2SeqLM.register(STMoEConfig, STMoEForConditionalGeneration)
