"""A run whose gradients and rows travel by a schedule equals the run with torch's collectives.

Both are trained in the same processes, from the same weights on the same batches.
"""

import pytest
import torch
import torch.distributed as dist

from moe.distributed.mesh import MeshConfig, build_mesh
from moe.models.parallelize import shard_model
from moe.optim.parameter_groups import parameter_groups
from moe.training.recipe import OptimRecipe, PretrainRecipe, TrainingRecipe
from moe.training.step import train_step
from tests.distributed.ranks import run_ranks
from tests.distributed.stages import batch, whole
from tests.models.tiny import tiny_model

FIELDS = {
    "vocab_size": 53,
    "d_model": 13,
    "d_kv": 3,
    "d_ff": 20,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 4,
    "num_experts": 8,
    "group_size": 26,
}

MESHES = {
    "a ring of shards": {"dp_shard": 4, "gradient_reduction": "ring"},
    "rings of two axes": {"dp_shard": 2, "dp_replicate": 2, "gradient_reduction": "ring"},
    "rings beside experts": {"dp_shard": 2, "ep": 2, "gradient_reduction": "two_way_ring"},
    "replicas on a grid": {"dp_replicate": 4, "gradient_reduction": "ring 2x2"},
    "shards on a grid": {"dp_shard": 4, "gradient_reduction": "ring 2x2"},
    "without dead ranks": {"dp_shard": 4, "gradient_reduction": "ring 2x3 without 1,5"},
    "replicated experts": {"dp_replicate": 2, "ep": 2, "gradient_reduction": "ring"},
}


def trained(config, rows, *, steps=3, dtype=torch.float64, lr=0.1):
    """Returns all weights whole after some updates, and the model."""
    model = tiny_model(**FIELDS).to(dtype).train()
    mesh = build_mesh(config, "cpu")
    shard_model(model, mesh)
    recipe = PretrainRecipe(
        optim=OptimRecipe(lr=lr, warmup_steps=1, max_grad_norm=0.5),
        training=TrainingRecipe(
            steps=99, batch_size=rows, micro_batch_size=rows // config.num_ranks // 2
        ),
    )
    optimizer = torch.optim.AdamW(parameter_groups(model), eps=1e-3)
    for step in range(steps):
        data = batch(step, rows)
        data = {name: value[mesh.rows(rows)] for name, value in data.items()}
        train_step(model, optimizer, recipe, data, step, mesh)
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def farthest(ours, theirs):
    """Returns the largest difference of two models, relative to each weight's largest entry."""
    distances = []
    for name, weight in theirs.items():
        scale = weight.abs().max().clamp(min=1e-30)
        distances.append(float((ours[name] - weight).abs().max() / scale))
    return max(distances)


def is_equal_on_all_ranks(weights):
    flat = torch.cat([weight.flatten() for weight in weights.values()])
    first = flat.clone()
    dist.broadcast(first, 0)
    return torch.equal(flat, first)


def by_schedule_and_by_torch(rank, num_ranks):
    answers = {}
    for name, fields in MESHES.items():
        sizes = {key: value for key, value in fields.items() if isinstance(value, int)}
        ours = trained(MeshConfig(**fields), 16)
        theirs = trained(MeshConfig(**sizes), 16)
        answers[name] = (farthest(ours, theirs), is_equal_on_all_ranks(ours))
    return answers


@pytest.mark.slow
def test_gradients_summed_by_a_schedule_equal_those_of_torch(tmp_path):
    for answer in run_ranks(by_schedule_and_by_torch, 4, tmp_path):
        for name, (distance, is_equal) in answer.items():
            assert distance < 1e-10, name
            assert is_equal, name
