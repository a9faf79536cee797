"""Pools and experts of a prefix on two ranks, beside one process."""

import pytest
import torch

from moe.distributed.mesh import MeshConfig, build_mesh
from moe.models.parallelize import shard_model
from tests.distributed.ranks import run_ranks
from tests.models.tiny import tiny_batch, tiny_model

FIELDS = {
    "d_ff": 22,
    "num_heads": 4,
    "num_experts": 10,
    "prefix_experts": [{"prefix": "mk:", "token_ids": [12, 7], "num_experts": 3}],
    "capacity_factor": None,
    "eval_capacity_factor": None,
    "router": "pools",
}


def batch_of(seed):
    """Returns a batch in which every second text has the prefix."""
    batch = tiny_batch(seed=seed)
    batch["input_ids"][::2, :2] = torch.tensor([12, 7])
    return batch


def logits_of(model, batch):
    """Returns the logits in evaluation, and those of the decoder's router in training."""
    with torch.no_grad():
        logits = model.eval()(**batch).logits
        torch.manual_seed(0)
        routers = model.train()(**batch, output_router_logits=True).decoder_router_logits
    return logits, routers[0]


def on_meshes(rank, num_ranks):
    answers = []
    for sizes in (MeshConfig(ep=2), MeshConfig(tp=2)):
        mesh = build_mesh(sizes, "cpu")
        model = tiny_model(**FIELDS)
        shard_model(model, mesh)
        answers.append(logits_of(model, batch_of(mesh.data_rank)))
    return answers


@pytest.mark.slow
def test_ranks_of_ep_and_tp_compute_what_one_process_does(tmp_path):
    """Router logits in training show the pools: an expert outside of one has the lowest number."""
    model = tiny_model(**FIELDS)
    expected = [logits_of(model, batch_of(seed)) for seed in range(2)]
    assert (expected[0][1] < -1e30).any()
    for rank, (of_ep, of_tp) in enumerate(run_ranks(on_meshes, 2, tmp_path)):
        for ours, theirs in ((of_ep, expected[rank]), (of_tp, expected[0])):
            torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-4)
            torch.testing.assert_close(ours[1] < -1e30, theirs[1] < -1e30)
