"""Transformers' own T5 with the weights of one of our dense models: the oracle of attention, caches and outputs."""

import torch
from transformers import T5Config, T5ForConditionalGeneration

from moe import STMoEForConditionalGeneration

FIELDS = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads", "feed_forward_proj")


@torch.no_grad()
def as_t5(ours: STMoEForConditionalGeneration, attention: str = "eager") -> T5ForConditionalGeneration:
    tied = ours.config.tie_word_embeddings
    config = T5Config(
        **{name: getattr(ours.config, name) for name in FIELDS},
        dropout_rate=0.0,
        tie_word_embeddings=tied,
        decoder_start_token_id=0,
    )
    config._attn_implementation = attention
    theirs = T5ForConditionalGeneration(config).eval()
    theirs.shared.weight.copy_(ours.get_input_embeddings().weight)
    if not tied:
        # T5Config ties the head whatever is asked; give it one of its own.
        theirs.lm_head.weight = torch.nn.Parameter(ours.lm_head.weight.clone())
        theirs.encoder.embed_tokens.weight.copy_(ours.get_input_embeddings().weight)
        theirs.decoder.embed_tokens.weight.copy_(ours.get_input_embeddings().weight)
    for stack, other in ((ours.model.encoder.stack, theirs.encoder), (ours.model.decoder, theirs.decoder)):
        other.block[0].layer[0].SelfAttention.relative_attention_bias.weight.copy_(stack.position_bias.table)
        other.final_layer_norm.weight.copy_(stack.final_norm.weight)
        for block, b in zip(stack.blocks, other.block, strict=True):
            pairs = [(block.self_attention, b.layer[0].SelfAttention)]
            if stack.decoder:
                pairs.append((block.cross_attention, b.layer[1].EncDecAttention))
            for a, hf in pairs:
                for name in "qkvo":
                    getattr(hf, name).weight.copy_(getattr(a, f"{name}_proj").weight)
            dense = b.layer[-1].DenseReluDense
            if block.feed_forward.gated:
                gate, up = block.feed_forward.up_proj.weight.chunk(2)
                dense.wi_0.weight.copy_(gate)
                dense.wi_1.weight.copy_(up)
            else:
                dense.wi.weight.copy_(block.feed_forward.up_proj.weight)
            dense.wo.weight.copy_(block.feed_forward.down_proj.weight)
    return theirs
