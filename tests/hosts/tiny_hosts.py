"""A host of each kind, small enough for any test; widths are distinct primes times two."""

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    T5Gemma2Config,
    T5Gemma2ForConditionalGeneration,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from moe.hosts.upcycle import upcycle_host
from moe.sparse.editing import sparse_layers
from moe.surgery.upcycle import Upcycling
from tests.models.tiny import tiny_batch

STACK = {
    "vocab_size": 131,
    "hidden_size": 10,
    "intermediate_size": 14,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "query_pre_attn_scalar": 6,
    "sliding_window": 5,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "initializer_range": 0.5,
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 4,
    "patch_size": 2,
}


def t5gemma(**changes):
    wider = {**STACK, "hidden_size": 22, "intermediate_size": 26}  # as in 9B-2B
    config = T5GemmaConfig(encoder=wider, decoder=STACK, vocab_size=131, **changes)
    return T5GemmaForConditionalGeneration(config)


def t5gemma2(**changes):
    encoder = {
        "text_config": STACK,
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "boi_token_index": 128,
        "image_token_index": 129,
        "eoi_token_index": 130,
        "initializer_range": 0.5,
    }
    config = T5Gemma2Config(
        encoder=encoder, decoder=STACK, image_token_index=129, initializer_range=0.5, **changes
    )
    return T5Gemma2ForConditionalGeneration(config)


BART = {
    "vocab_size": 131,
    "d_model": 10,
    "encoder_ffn_dim": 26,
    "decoder_ffn_dim": 14,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "scale_embedding": True,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "init_std": 0.7,
}
AUDIO = {"num_mel_bins": 3, "max_source_positions": 13, "max_target_positions": 64}
AUDIO |= {"begin_suppress_tokens": None}


def like_bart(model_class, config_class, **fields):
    """Returns a function that makes a host of BART's kind."""

    def make(**changes):
        model = model_class(config_class(**{**BART, **fields, **changes}))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(std=0.3)
        return model

    return make


TINY = {
    "t5gemma": t5gemma,
    "t5gemma2": t5gemma2,
    "m2m_100": like_bart(M2M100ForConditionalGeneration, M2M100Config),
    "mbart": like_bart(MBartForConditionalGeneration, MBartConfig),
    "bart": like_bart(BartForConditionalGeneration, BartConfig),
    "marian": like_bart(
        MarianMTModel,
        MarianConfig,
        activation_function="swish",
        decoder_vocab_size=137,
        share_encoder_decoder_embeddings=False,
        decoder_start_token_id=0,
    ),
    "pegasus": like_bart(
        PegasusForConditionalGeneration, PegasusConfig, activation_function="relu"
    ),
    "whisper": like_bart(WhisperForConditionalGeneration, WhisperConfig, **AUDIO),
}


def host_batch(name, seed=0):
    """Returns the batch of `tiny_batch` for a host; Whisper hears a sound in place of its ids."""
    batch = tiny_batch(seed=seed)
    if name == "whisper":
        length = batch.pop("attention_mask").shape[1]
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(len(batch.pop("input_ids")), 3, 2 * length, generator=generator)
        batch = {"input_features": features, **batch}
    return batch


def dense_host(name, seed=0, **changes):
    """Returns a host in evaluation mode whose norms have trained scales."""
    torch.manual_seed(seed)
    model = TINY[name](**changes).eval()
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def sparse_host(name, seed=0, differ=False, **settings):
    """Returns the upcycled twin of `dense_host`, with a router that has opinions.

    With `differ` its experts are no longer copies of one another.
    """
    fields = {"router_initializer_std": 1.0, **settings.pop("fields", {})}
    upcycling = Upcycling(**{"num_experts": 5, "fields": fields, **settings})
    model = upcycle_host(dense_host(name, seed), upcycling)
    if differ:
        torch.manual_seed(seed)
        for layer in sparse_layers(model).values():
            for weight in layer.experts.parameters():
                weight.data += 0.3 * weight.std() * torch.randn_like(weight)
    return model


def experts_of(model):
    """Returns the parameters of all experts."""
    layers = sparse_layers(model).values()
    return [weight for layer in layers for weight in layer.experts.parameters()]
