"""Models of transformers' own classes, small and random: the oracle of every conversion."""

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import (
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

SIZES = {
    "vocab_size": 131,
    "d_model": 29,
    "d_kv": 5,
    "d_ff": 31,
    "num_layers": 4,
    "num_decoder_layers": 6,
    "num_heads": 3,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
SPARSE = {
    "num_experts": 7,
    "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 2,
    "expert_capacity": 2,
}
T5 = {
    "T5 1.0": {"feed_forward_proj": "relu"},
    "T5 1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "T5 1.1, head is the embedding": {
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
}
SWITCH = {
    "Switch": {},
    "Switch, every layer sparse": {"num_sparse_encoder_layers": 4, "num_sparse_decoder_layers": 6},
    "Switch, sparse decoder only": {"num_sparse_encoder_layers": 0, "encoder_sparse_step": 0},
    "Switch, no layer named sparse": {"num_sparse_encoder_layers": 0},  # it builds one all the same
    "Switch, untied": {"tie_word_embeddings": False},
}
# transformers 5.17 counts an expert's capacity over the whole batch, and cannot compute the losses.
needs_a_right_switch = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"),
    reason="the Switch of transformers 5.17 counts capacity over the batch",
)
every_kind = pytest.mark.parametrize(
    "kind", [*T5, *(pytest.param(kind, marks=needs_a_right_switch) for kind in SWITCH)]
)


def their_model(kind="Switch", seed=0, **changes):
    """Returns a model of transformers in evaluation mode; attention is eager, as their Switch knows
    no other.
    """
    torch.manual_seed(seed)
    if kind in T5:
        config = T5Config(**{**SIZES, **T5[kind], **changes}, attn_implementation="eager")
        model = T5ForConditionalGeneration(config)
        if (
            kind == "T5 1.1"
        ):  # their config ties the head whatever is asked; the published models have one of their own
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
            model.all_tied_weights_keys.pop("lm_head.weight")
    else:
        config = SwitchTransformersConfig(
            **{**SIZES, **SPARSE, **SWITCH[kind], **changes}, attn_implementation="eager"
        )
        model = SwitchTransformersForConditionalGeneration(config)
        for stack in (model.encoder, model.decoder):  # an untied one gives each stack another table
            stack.embed_tokens.weight.data.copy_(model.shared.weight.data)
    return model.eval()


def their_inputs(batch=3, length=17, targets=13):
    """Returns token ids <int64>[B, L] and <int64>[B, T]."""
    generator = torch.Generator().manual_seed(0)
    draw = {"input_ids": (batch, length), "decoder_input_ids": (batch, targets)}
    return {name: torch.randint(2, 131, shape, generator=generator) for name, shape in draw.items()}


def assert_equal_to_rounding(ours, theirs):
    """Compares numbers <float>[...] to 1e-5 of the largest."""
    torch.testing.assert_close(
        ours, theirs, rtol=0, atol=1e-5 * max(1.0, theirs.abs().max().item())
    )
