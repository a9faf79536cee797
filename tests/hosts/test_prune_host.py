"""Pruned hosts: their layers may differ in experts, and compute what masked ones do."""

import pytest
import torch

from moe.checkpoint.loading import load_model
from moe.hosts.all_hosts import count_parameters
from moe.sparse.editing import edit_routing, sparse_layers
from moe.sparse.edits import RerouteExperts
from moe.surgery.prune import Pruning, choose_experts, prune_checkpoint
from tests.hosts.tiny_hosts import host_batch, sparse_host


@pytest.mark.parametrize("name", ["marian", "t5gemma2", "whisper"])
def test_a_pruned_host_equals_a_masked_one(name, tmp_path):
    model = sparse_host(name, differ=True)
    with torch.no_grad():  # logits without rounding: each is twice one coordinate of the token
        for layer in sparse_layers(model).values():
            layer.router.gate.copy_(2 * torch.eye(*layer.router.gate.shape).roll(1, dims=1))
    model.save_pretrained(tmp_path / "whole")
    kept = choose_experts(model, [host_batch(name)], Pruning("importance", keep=(4, 2))).kept
    (tmp_path / "pruned").mkdir()
    prune_checkpoint(tmp_path / "whole", tmp_path / "pruned", kept)
    pruned = load_model(tmp_path / "pruned")

    masks = {}
    for key, experts in kept.items():
        masks[key] = RerouteExperts(*(e for e in range(5) if e not in experts))
    batch = host_batch(name)
    real = batch["labels"] != -100
    with edit_routing(model, masks):
        masked = model(**batch).logits[real]
        answers = model.generate(next(iter(batch.values())), max_new_tokens=7)
    assert torch.equal(pruned(**batch).logits[real], masked)
    assert torch.equal(pruned.generate(next(iter(batch.values())), max_new_tokens=7), answers)

    # Numbers of experts are known without the weights.
    layers = sparse_layers(pruned)
    assert [layer.experts.down_proj.shape[0] for layer in layers.values()] == [4, 2]
    total = pruned.num_parameters()
    idle = 2 * sum(w[0].numel() for w in layers["encoder", 0].experts.parameters())
    assert count_parameters(tmp_path / "pruned") == (total, total - idle)
