"""Adapters on two ranks against one process: losses, updates and files.

Ranks of `ep` hold all adapters and use those of their experts; the oracle is the same training
without a mesh.
"""

import pytest
import torch

from moe import ConfigError, lora_config
from moe.distributed.mesh import MeshConfig, build_mesh
from moe.models import select_parameters
from moe.models.parallelize import model_layouts, shard_model
from moe.models.pretrained import enable_activation_checkpointing
from moe.optim.optimizers import build_adamw
from moe.optim.parameter_groups import parameter_groups
from tests.distributed import stages
from tests.distributed.ranks import run_ranks, whole
from tests.models.tiny import tiny_model
from tests.training.one_step import train_step

MESHES = {
    "ep 2": ((1, 1, 2, 1), {}),
    "dp_shard 2": ((1, 2, 1, 1), {"attention": False}),
    "dp_replicate 2": ((2, 1, 1, 1), {"experts": False}),
}
"""Mesh, and what is adapted."""


def tuned(adapted, config=None, *, checkpointed=False):
    """Returns the losses of three updates, the adapters after them, and their numbers."""
    model = stages.build()
    model.add_adapter(lora_config(model, rank=3, **adapted))
    mesh = None if config is None else build_mesh(config, "cpu")
    if mesh is not None:
        shard_model(model, mesh)
    if checkpointed:
        enable_activation_checkpointing(model, {"use_reentrant": False})
    selection = select_parameters(model, "lora")
    optimizer = build_adamw(parameter_groups(model), weight_decay=0.01, epsilon=1e-3)

    losses = []
    for number in range(3):
        batch = stages.batch(number)
        if mesh is not None:
            batch = {name: value[mesh.rows(stages.ROWS)] for name, value in batch.items()}
        losses.append(float(train_step(model, optimizer, stages.RECIPE, batch, number, mesh).loss))
    adapters = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            adapters[name] = whole(parameter)
    return losses, adapters, selection


def on_two_ranks(rank, num_ranks):
    found = {}
    for name, (sizes, adapted) in MESHES.items():
        expected_losses, expected, expected_selection = tuned(adapted)
        losses, adapters, selection = tuned(adapted, MeshConfig(*sizes), checkpointed=True)
        assert adapters.keys() == expected.keys()
        assert losses == pytest.approx(expected_losses, abs=1e-10)
        assert selection == expected_selection
        for key, value in expected.items():
            torch.testing.assert_close(adapters[key], value, rtol=0, atol=1e-9, msg=f"{name} {key}")
        moved = [key for key, value in expected.items() if ".lora_B." in key and value.any()]
        found[name] = len(moved)
    return found


@pytest.mark.slow
def test_adapters_train_on_a_mesh_as_in_one_process(tmp_path):
    # 3 + 2 attentions of 4 maps in 2 + 1 blocks, and 2 products of routed and 2 of shared experts in
    # each of 2 sparse layers.
    for found in run_ranks(on_two_ranks, 2, tmp_path):
        assert found["ep 2"] == found["dp_shard 2"] + found["dp_replicate 2"]
        assert found["dp_shard 2"] == 2 * (2 + 2)


def test_adapters_over_tp_are_refused():
    model = tiny_model()
    model.add_adapter(lora_config(model, rank=3))
    with pytest.raises(ConfigError, match=r"mesh\.tp is 2; expected 1 for a model with adapters"):
        model_layouts(model, model.config, MeshConfig(tp=2))
