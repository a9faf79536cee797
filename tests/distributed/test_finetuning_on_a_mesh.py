"""Parts of a model that train on a mesh, and kept slots, against the same in one process.

Two ranks take two updates on each mesh, once in micro-batches with activation checkpointing too;
every weight and every tensor of the optimizer must be that of one process.
"""

import dataclasses

import pytest
import torch

from moe import CheckpointError, select_parameters
from moe.checkpoint.optimizer_state import load_optimizer_state
from moe.checkpoint.run_state import RunState
from moe.checkpoint.writer import CheckpointWriter
from moe.distributed.mesh import MeshConfig, build_mesh
from moe.models.pretrained import enable_activation_checkpointing
from moe.models.trainable_parameters import SUBSETS
from moe.optim.parameter_groups import parameter_groups
from moe.training.recipe import TrainingRecipe
from tests.distributed import stages
from tests.distributed.ranks import run_ranks
from tests.distributed.stages import Stage, adafactor

MESHES = {"ep 2": (1, 1, 2, 1), "dp_shard 2": (1, 2, 1, 1), "tp 2": (1, 1, 1, 2)}
IN_PARTS = ("moe", "ffn")
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


def distances(ours, theirs):
    assert ours.keys() == theirs.keys()
    return {
        name: float((ours[name].double() - theirs[name].double()).abs().max()) for name in theirs
    }


def on_two_ranks(rank, num_ranks, slots):
    found = {}
    expected = {
        (subset, kept): tuned(subset, slots if kept else None)
        for subset in SUBSETS
        for kept in (False, True)
    }
    for name, sizes in MESHES.items():
        mesh = build_mesh(MeshConfig(*sizes), "cpu")
        for (subset, kept), (theirs, selected) in expected.items():
            ours, selection = tuned(subset, slots if kept else None, mesh)
            far = {
                key: value for key, value in distances(ours, theirs).items() if not value <= 1e-10
            }
            found[name, subset, kept] = far, selection == selected
            if kept and subset in IN_PARTS:
                again, _ = tuned(subset, slots, mesh, micro=2)
                found[name, subset, "in parts"] = (
                    {k: v for k, v in distances(again, theirs).items() if not v <= 1e-10},
                    True,
                )
    stage = Stage("adafactor", build_mesh(MeshConfig(*MESHES["ep 2"]), "cpu"))
    with pytest.raises(CheckpointError, match="has optimizer state of adafactor, not of adamw"):
        load_optimizer_state(slots, stage.model, stage.optimizer, stage.layouts, "adamw")
    changed = {key for key in expected["ffn", False][0] if not key.startswith("optimizer/")}
    changed = {
        k
        for k in changed
        if not torch.equal(expected["ffn", False][0][k], expected["ffn", True][0][k])
    }
    return found, changed


@pytest.mark.slow
def test_a_subset_trains_on_a_mesh_as_in_one_process_with_slots_kept_or_fresh(tmp_path):
    before = Stage("adafactor")
    for number in range(3):
        before.step(number)
    with CheckpointWriter(tmp_path / "slots", keep=1) as writer:
        writer.save(before.model, before.optimizer, before.layouts, RunState(3, "abc", RECIPE))
    for found, changed in run_ranks(on_two_ranks, 2, tmp_path, tmp_path / "slots"):
        assert len(found) == len(MESHES) * (len(SUBSETS) * 2 + len(IN_PARTS))
        assert {case: far for case, (far, _) in found.items() if far} == {}
        assert all(same for _, same in found.values())
        assert changed  # kept slots are not fresh ones
        assert all(".feed_forward." in name for name in changed)
