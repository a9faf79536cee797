"""Ranks that share experts may hold batches of different shapes, as a collator that pads to the longest
text makes them.

The oracle is one process that goes through the batches one after the other.
"""

import pytest

from moe.distributed.mesh import MeshConfig, build_mesh
from moe.models.losses import add_counts
from moe.models.parallelize import shard_model
from tests.distributed.ranks import run_ranks, whole
from tests.models.tiny import tiny_batch, tiny_model

SHAPES = [(3, 13, 11), (2, 7, 5)]
"""Rows and lengths of the batch of each rank."""


def build(dispatch):
    model = tiny_model(num_experts=8, group_size=26, dispatch=dispatch)
    return model.double().train()


def differences(rank, num_ranks):
    """Returns how far logits and gradients are from one process; the shapes change places once."""
    mesh = build_mesh(MeshConfig(ep=2), "cpu")
    distances = {}
    for dispatch in ("ragged", "static"):
        model, oracle = build(dispatch), build(dispatch)
        shard_model(model, mesh)
        for swapped in (False, True):
            batches = [tiny_batch(*shape) for shape in (SHAPES[::-1] if swapped else SHAPES)]
            counts = add_counts(*[model.loss_counts(batch) for batch in batches])
            expected = [oracle(**batch, loss_counts=counts) for batch in batches]
            for result in expected:
                result.loss.backward()

            output = model(**batches[rank], loss_counts=counts)
            output.loss.backward()
            far = float((output.logits - expected[rank].logits).abs().max())
            for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
                gradient = whole(ours.grad).reshape(theirs.shape)
                far = max(far, float((gradient - theirs.grad).abs().max()))
            distances[dispatch, swapped] = far
            model.zero_grad()
            oracle.zero_grad()
    return distances


@pytest.mark.slow
def test_batches_of_different_shapes_give_what_one_process_gives(tmp_path):
    for distances in run_ranks(differences, 2, tmp_path):
        assert len(distances) == 4
        assert max(distances.values()) < 1e-10, distances
