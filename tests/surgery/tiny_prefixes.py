"""Small models with experts of prefixes: random rows behind those of the same parent."""

import torch

from moe import STMoEForConditionalGeneration
from moe.surgery.join import with_prefixes
from tests.models.tiny import tiny_batch, tiny_model

MK = {"prefix": "mk:", "token_ids": [12, 7], "num_experts": 3}
AZ = {"prefix": "az:", "token_ids": [12, 9], "num_experts": 2}
SR = {"prefix": "sr:", "token_ids": [5], "num_experts": 5}


def add_prefixes(parent, records, seed=1):
    """Returns a parent with random experts of more prefixes behind its own."""
    config = with_prefixes(parent.config, [*(parent.config.prefix_experts or ()), *records])
    torch.manual_seed(seed)
    model = STMoEForConditionalGeneration(config).eval()
    weights = parent.state_dict()
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            weight[: len(weights[name])] = weights[name]
    return model


def parent_model(**fields):
    """Returns a model with a capacity, without experts of a prefix.

    Rows of its weights are multiples of 64 bytes: products of others may depend on where an expert lies.
    """
    sizes = {"d_model": 32, "d_ff": 48, "eval_capacity_factor": 1.3, "min_expert_capacity": 0}
    return tiny_model(**{**sizes, **fields})


def batch_with(*records):
    """Returns a batch whose first texts begin with a prefix each, and the others with none."""
    batch = tiny_batch(batch=5)
    for row, record in enumerate(records):
        ids = record["token_ids"]
        batch["input_ids"][row, : len(ids)] = torch.tensor(ids)
    return batch
