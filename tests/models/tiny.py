"""A model small enough for any test; sizes are distinct primes."""

import torch
from transformers import PreTrainedModel

from moe import STMoEConfig, STMoEForConditionalGeneration
from moe.models.pretrained import enable_activation_checkpointing

FIELDS = {
    "vocab_size": 131,
    "d_model": 29,
    "d_kv": 5,
    "d_ff": 31,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 3,
    "num_experts": 7,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "sparse_dense_stacking": True,
    "router_options": {"second_expert_policy": "all", "eval_second_expert_policy": "all"},
    "initializer_scale": 1.0,
    "router_initializer_std": 0.5,
}

DENSE = {
    "num_experts": 0,
    "num_sparse_encoder_layers": 0,
    "num_sparse_decoder_layers": 0,
    "sparse_dense_stacking": False,
}

UL2_AND_UMT5 = {"feed_forward_proj": "gated-silu", "relative_bias_in_every_block": True}


def tiny_model(seed: int = 0, **changes) -> STMoEForConditionalGeneration:
    torch.manual_seed(seed)
    return STMoEForConditionalGeneration(STMoEConfig(**{**FIELDS, **changes})).eval()


def tiny_batch(
    batch: int = 4, length: int = 13, targets: int = 11, seed: int = 0
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch, length, dtype=torch.int64)
    labels = torch.randint(2, 131, (batch, targets), generator=generator)
    for row in range(batch):
        mask[row, length - row :] = 0
        labels[row, targets - row :] = -100
    return {
        "input_ids": torch.randint(2, 131, (batch, length), generator=generator) * mask,
        "attention_mask": mask,
        "labels": labels,
    }


def checkpointed(model: PreTrainedModel, *settings) -> PreTrainedModel:
    """Switches activation checkpointing on."""
    enable_activation_checkpointing(model, *settings)
    return model
