"""A tokenizer of numbered words, texts that differ in length, and models that answer them."""

import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedTokenizerFast,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from moe.sparse.all_routers import load_routers
from tests.hosts.tiny_hosts import dense_host, sparse_host
from tests.models.tiny import tiny_model

V = 131
"""Tokens: padding 0, end 1, and the words w2 to w130."""

T5_SIZES = {
    "vocab_size": V,
    "d_model": 24,
    "d_kv": 6,
    "d_ff": 31,
    "num_layers": 2,
    "num_heads": 3,
    "feed_forward_proj": "relu",
    "initializer_factor": 3.0,
    "decoder_start_token_id": 0,
}


def word_tokenizer():
    words = {"<pad>": 0, "</s>": 1, **{f"w{index}": index for index in range(2, V)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="</s>"
    )


def texts(number=23, longest=17, seed=0):
    draw = random.Random(seed)
    return [
        " ".join(f"w{draw.randrange(2, V)}" for _ in range(draw.randrange(1, longest)))
        for _ in range(number)
    ]


def ours(router="token_choice"):
    single = load_routers().get(router).single
    model = tiny_model(
        eval_capacity_factor=None,
        router=router,
        num_selected_experts=1 if single else 2,
        router_options={},
        num_sparse_decoder_layers=1 if load_routers().get(router).causal else 0,
    )
    return model


def t5():
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**T5_SIZES)).eval()


def switch():
    torch.manual_seed(0)
    config = SwitchTransformersConfig(
        **T5_SIZES, num_decoder_layers=2, num_experts=3, expert_capacity=64
    )
    return SwitchTransformersForConditionalGeneration(config).eval()


def bart():
    torch.manual_seed(0)
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 24, "init_std": 0.7}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 1}
    config = BartConfig(
        vocab_size=V,
        encoder_ffn_dim=31,
        decoder_ffn_dim=31,
        forced_eos_token_id=1,
        **sizes,
        **heads,
        **tokens,
    )
    return BartForConditionalGeneration(config).eval()


MODELS = {
    "t5": t5,
    "switch": switch,
    "bart": bart,
    "t5gemma": lambda: dense_host("t5gemma"),
    "t5gemma2": lambda: dense_host("t5gemma2"),
    "sparse_t5gemma": lambda: sparse_host(
        "t5gemma", fields={"eval_capacity_factor": None, "router_initializer_std": 1.0}
    ),
}
