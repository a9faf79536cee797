"""Parts of a model that train on a mesh, and kept slots, against the same in one process.

Two ranks take two updates on each mesh, some in micro-batches with activation checkpointing; every
weight and every tensor of the optimizer must be that of one process.
"""

import dataclasses

import pytest
import torch

from moe import CheckpointError
from moe.checkpoint.optimizer_state import load_optimizer_state
from moe.checkpoint.run_state import RunState
from moe.checkpoint.writer import CheckpointWriter
from moe.distributed.mesh import MeshConfig, build_mesh
from moe.models import select_parameters
from moe.models.pretrained import enable_activation_checkpointing
from moe.optim.parameter_groups import parameter_groups
from moe.training.recipe import TrainingRecipe
from tests.distributed import stages
from tests.distributed.ranks import run_ranks
from tests.distributed.stages import Stage, adafactor

MESHES = {"ep 2": (1, 1, 2, 1), "dp_shard 2": (1, 2, 1, 1), "tp 2": (1, 1, 1, 2)}
CASES = [
    ("ep 2", "moe", True, 2),
    ("ep 2", "non_moe", False, None),
    ("dp_shard 2", "ffn", True, 2),
    ("dp_shard 2", "attention", False, None),
    ("tp 2", "all", True, None),
    ("tp 2", "router_frozen", True, None),
]
"""Mesh, subset, whether slots are kept, and rows of a micro-batch: each subset on one mesh."""

RECIPE = {"optim": {"optimizer": "adafactor"}, "training": {"steps": 3}}


def tuned(subset, slots=None, mesh=None, micro=None):
    """Returns what a stage holds after two updates of a subset, and its selection."""
    training = TrainingRecipe(steps=99, batch_size=stages.ROWS, micro_batch_size=micro)
    stages.RECIPE = dataclasses.replace(stages.RECIPE, training=training)
    stage = Stage("adafactor", mesh)
    if micro is not None:
        enable_activation_checkpointing(stage.model, {"use_reentrant": False})
    selection = select_parameters(stage.model, subset)
    stage.optimizer = adafactor(stage.model)
    if slots is not None:
        load_optimizer_state(slots, stage.model, stage.optimizer, stage.layouts, "adafactor")
    for number in range(2):
        stage.step(number)
    trained = {id(p) for group in parameter_groups(stage.model) for p in group["params"]}
    assert {id(p) for p in stage.optimizer.state} <= trained
    assert all((p.grad is None) for p in stage.model.parameters() if id(p) not in trained)
    return stage.content(), selection


def differing(ours, theirs):
    """Returns the names of the tensors that are not those of one process."""
    assert ours.keys() == theirs.keys()
    return [n for n in theirs if not torch.allclose(ours[n], theirs[n], rtol=0, atol=1e-10)]


def on_two_ranks(rank, num_ranks, slots):
    found = []
    for name, subset, is_kept, micro in CASES:
        mesh = build_mesh(MeshConfig(*MESHES[name]), "cpu")
        theirs, expected_selection = tuned(subset, slots if is_kept else None)
        ours, selection = tuned(subset, slots if is_kept else None, mesh, micro)
        found.append((differing(ours, theirs), selection == expected_selection))

    stage = Stage("adafactor", build_mesh(MeshConfig(*MESHES["ep 2"]), "cpu"))
    with pytest.raises(CheckpointError, match="has optimizer state of adafactor, not of adamw"):
        load_optimizer_state(slots, stage.model, stage.optimizer, stage.layouts, "adamw")
    return found


@pytest.mark.slow
def test_a_subset_trains_on_a_mesh_as_in_one_process_with_slots_kept_or_fresh(tmp_path):
    before = Stage("adafactor")
    for number in range(3):
        before.step(number)
    with CheckpointWriter(tmp_path / "slots", keep=1) as writer:
        writer.save(before.model, before.optimizer, before.layouts, RunState(3, "abc", RECIPE))
    for found in run_ranks(on_two_ranks, 2, tmp_path, tmp_path / "slots"):
        assert found == [([], True)] * len(CASES)

    # Kept slots are not fresh ones.
    fresh, kept = (tuned("ffn", slots)[0] for slots in (None, tmp_path / "slots"))
    changed = {name for name in fresh if not torch.equal(fresh[name], kept[name])}
    changed = {name for name in changed if not name.startswith("optimizer/")}
    assert changed
    assert all(".feed_forward." in name for name in changed)
