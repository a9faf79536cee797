"""ST-MoE-32B, 269B parameters, sharded over 64 data x 16 model ranks as it was trained, with nothing
allocated.

The process below is the first of 1,024 ranks, of a fake process group, and its model is on the meta
device. It is a process of its own, since torch remembers meshes of a world that is gone.
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe.distributed.mesh import MeshConfig, build_mesh
from moe.distributed.sharding import MeshCoordinate, local_shard
from moe.models.configuration import STMoEConfig
from moe.models.parallelize import shard_model
from moe.optim.adafactor import Adafactor
from moe.optim.parameter_groups import parameter_groups
from moe.planning.memory import optimizer_bytes, parameter_bytes
from moe.planning.plan import build_model
from tests.processes import fork_context

MESH = MeshConfig(ep=64, tp=16)  # one expert on a data row, as in the paper's Mesh-TensorFlow runs
LIMIT = 4 * 2**30


def local_bytes(tensors):
    """Returns the bytes of this rank's parts."""
    return sum(local_shard(tensor).numel() * tensor.element_size() for tensor in tensors)


def adafactor_state(model):
    """Returns the tensors of Adafactor's state after a step with gradients that lie as the
    parameters do.
    """
    for parameter in model.parameters():
        parameter.grad = DTensor.from_local(
            torch.empty_like(local_shard(parameter)),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    optimizer = Adafactor(parameter_groups(model))
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, torch.Tensor)]


def check_rank(rank):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=MESH.num_ranks)
    model = build_model(STMoEConfig.from_preset("st-moe-32b"))
    mesh = build_mesh(MESH, "cpu")
    layouts = shard_model(model, mesh, bfloat16=True)
    coordinate = MeshCoordinate.of(mesh)

    named = dict(model.named_parameters())
    assert named.keys() == layouts.keys()
    assert sum(math.prod(layout.shape) for layout in layouts.values()) == 269_104_613_376
    for name, parameter in named.items():
        layout = layouts[name]
        shard = layout.shard_index(coordinate)
        assert parameter.device.type == "meta"
        assert parameter.shape == layout.shape, name
        assert local_shard(parameter).shape == layout.local_shape(MESH, shard), name
        if layout.expert:
            assert local_shard(parameter).shape[0] == 1  # 64 experts on 64 rows of the mesh
            assert local_shard(parameter).numel() == parameter.numel() // 1024
    num_wrapped = sum(isinstance(module, FSDPModule) for module in model.modules())
    assert num_wrapped == 1 + 48 + 12  # root, blocks, routers

    state = local_bytes(adafactor_state(model))
    parameters, gradients = local_bytes(named.values()), local_bytes(p.grad for p in named.values())
    assert parameters + gradients + state < LIMIT
    assert parameters == parameter_bytes(layouts, MESH)
    assert state == optimizer_bytes(layouts, MESH, "adafactor", {})
    dist.destroy_process_group()


@pytest.mark.slow
def test_st_moe_32b_is_sharded_over_1024_ranks_as_planned():
    fork_context()
    start_processes(check_rank, nprocs=1, start_method="forkserver")
