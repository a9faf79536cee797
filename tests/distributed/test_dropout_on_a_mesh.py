"""Dropout over tensor-parallel ranks: independent where each holds a shard, equal where all compute
the same.

A step of training saves each mask for its backward pass as a tensor of bool, of a shape by which it
is known here.
"""

import math

import pytest
import torch

from moe.checkpoint.integrity import latest_checkpoint
from moe.checkpoint.writer import CheckpointWriter
from moe.distributed.collectives import gather_or_raise
from moe.distributed.mesh import MeshConfig, build_mesh
from moe.models.parallelize import shard_model
from tests.distributed.ranks import run_ranks
from tests.distributed.stages import Stage, differing
from tests.models.tiny import tiny_batch, tiny_model

RATE = 0.3
FIELDS = {
    "d_model": 29,
    "d_ff": 22,
    "num_heads": 4,
    "num_experts": 6,
    "capacity_factor": None,
    "eval_capacity_factor": None,
    "dropout_rate": RATE,
}
TP = 2
MESHES = {2: MeshConfig(tp=TP), 4: MeshConfig(ep=2, tp=TP)}


# ---- masks ----


def masks_of_a_step(rank, num_ranks):
    """Returns the masks of a forward pass by what they are over."""
    mesh = build_mesh(MESHES[num_ranks], "cpu")
    model = tiny_model(**FIELDS).train()
    shard_model(model, mesh)
    batch = tiny_batch(batch=3, length=13, targets=5, seed=mesh.data_rank)
    masks = {"hidden units": [], "units of experts": [], "heads": [], "residual": []}

    def keep(saved):
        if saved.dtype == torch.bool:
            kind = kind_of_mask(tuple(saved.shape))
            masks.get(kind, []).append(saved.clone())
        return saved

    counts = model.loss_counts(batch, mesh)
    torch.manual_seed(5 + mesh.data_rank)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        model(**batch, loss_counts=counts)
    return masks, torch.rand(7)


def kind_of_mask(shape):
    match shape:
        case (_, 11):  # F / tp
            return "units of experts"
        case (3, _, 11):
            return "hidden units"
        case (3, 2, _, _):  # H / tp
            return "heads"
        case (3, _, 29):
            return "residual"


@pytest.mark.slow
def test_tensor_parallel_ranks_drop_shards_independently_and_the_residual_stream_alike(tmp_path):
    num_ranks = 4
    answers = run_ranks(masks_of_a_step, num_ranks, tmp_path)
    for first in range(0, num_ranks, TP):
        (ours, next_number), (theirs, their_next_number) = answers[first : first + TP]
        counts = {kind: len(masks) for kind, masks in ours.items()}
        assert counts == {"hidden units": 5, "units of experts": 2, "heads": 8, "residual": 19}
        assert torch.equal(next_number, their_next_number)

        for kind, masks in ours.items():
            ours_flat = torch.cat([mask.flatten() for mask in masks])
            theirs_flat = torch.cat([mask.flatten() for mask in theirs[kind]])
            if kind == "residual":
                assert torch.equal(ours_flat, theirs_flat)
                continue

            # The correlation of n independent pairs has the deviation 1 / sqrt(n).
            pair = torch.stack([ours_flat, theirs_flat]).double()
            correlation = torch.corrcoef(pair)[0, 1].item()
            assert abs(correlation) < 5 / math.sqrt(pair.shape[1]), kind


# ---- recomputation and resumption ----


def runs_with_dropout(rank, num_ranks, folder):
    """Returns how a checkpointed and a resumed run differ from one that is neither, and its end."""
    mesh = build_mesh(MESHES[num_ranks], "cpu")

    def start():
        return Stage("adamw", mesh, dropout_rate=RATE)

    undisturbed = start()
    losses = [undisturbed.step(number) for number in range(2)]

    recomputing = start()
    recomputing.model.activation_checkpointing_enable({"use_reentrant": False})
    recomputed_losses = [recomputing.step(number) for number in range(2)]

    interrupted = start()
    interrupted.step(0)
    with CheckpointWriter(folder, keep=1) as writer:
        interrupted.save(writer, 1)
    gather_or_raise(lambda: None)
    resumed = start()
    torch.rand(rank + 1)  # what was drawn before does not matter
    resumed_loss = resumed.step(resumed.load(latest_checkpoint(folder)))

    content = undisturbed.content()
    return {
        "recomputed": (differing(recomputing.content(), content), recomputed_losses == losses),
        "resumed": (differing(resumed.content(), content), resumed_loss == losses[1]),
        "content": content,
    }


@pytest.mark.slow
def test_recomputed_and_resumed_runs_drop_the_same_on_a_mesh(tmp_path):
    answers = run_ranks(runs_with_dropout, 4, tmp_path, tmp_path / "run")
    for answer in answers:
        assert answer["recomputed"] == ([], True)
        assert answer["resumed"] == ([], True)
        assert differing(answer["content"], answers[0]["content"]) == []
