"""A host of each kind, small enough for any test; widths are distinct primes times two."""

import torch
from transformers import (
    T5Gemma2Config,
    T5Gemma2ForConditionalGeneration,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)

from moe.hosts.upcycle import upcycle_host
from moe.sparse.editing import sparse_layers
from moe.surgery.upcycle import Upcycling

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


TINY = {"t5gemma": t5gemma, "t5gemma2": t5gemma2}


def dense_host(name, seed=0, **changes):
    """Returns a host in evaluation mode whose norms have trained scales."""
    torch.manual_seed(seed)
    model = TINY[name](**changes).eval()
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.3)
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
