"""Small models with routers that decide, and batches with padding, for the tests of this folder."""

import torch

from moe import STMoEConfig, STMoEForConditionalGeneration
from moe.sparse.all_routers import load_routers

V, E = 61, 4


def build_model(router="token_choice", seed=0, **fields):
    """Returns a model in evaluation mode; its decoder is dense where the router may not be there."""
    kind = load_routers().get(router)
    settings = {
        "vocab_size": V,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 4,
        "num_decoder_layers": 2,
        "num_heads": 2,
        "num_experts": E,
        "num_selected_experts": 1 if kind.single else 2,
        "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 1 if kind.causal else 0,
        "router": router,
        "router_initializer_std": 0.7,
        "initializer_scale": 1.0,
    }
    torch.manual_seed(seed)
    return STMoEForConditionalGeneration(STMoEConfig(**{**settings, **fields})).eval()


def build_batch(rows=6, length=13, targets=7, seed=0):
    """Returns a batch in which every row has its own length."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, V, (rows, length), generator=generator)
    labels = torch.randint(3, V, (rows, targets), generator=generator)
    mask = torch.ones_like(input_ids)
    for row in range(rows):
        mask[row, length - row :] = 0
        labels[row, targets - row % 4 :] = -100
    input_ids[mask == 0] = 0
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


def rows_of(batch, rows):
    """Returns a batch of some rows, in that order."""
    return {name: value[rows] for name, value in batch.items()}
