"""Hosts with sparse layers on a mesh: loss, gradients and saved weights are those of one process.

The oracle is the same model, whole, with the whole batch; every rank computes it. The hosts' norms
compute in float32 even so.
"""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from moe.checkpoint.final_model import save_model_on_mesh
from moe.checkpoint.loading import load_model
from moe.distributed.mesh import MeshConfig, build_mesh
from moe.errors import ConfigError
from moe.hosts.parallelize import shard_host
from moe.sparse.editing import STACKS, sparse_layers
from tests.distributed.ranks import run_ranks, whole
from tests.hosts.tiny_hosts import sparse_host
from tests.models.tiny import tiny_batch

pytestmark = pytest.mark.slow

MESHES = {
    "ep": ({"ep": 2}, (2, 10, 14)),
    "fsdp": ({"dp_shard": 2}, (2, 10, 14)),
    "both": ({"ep": 2, "dp_shard": 2}, (1, 10, 14)),
}
"""Sizes of the mesh, and the shape of each rank's shard of the experts."""
FIELDS = {
    "group_size": 13,
    "capacity_factor": 1.0,
    "load_balance_loss_weight": 0.5,
    "router_z_loss_weight": 0.2,
}


def build(name):
    return sparse_host(name, num_experts=4, fields=FIELDS).double().train()


def differences(name, sizes, folder):
    """Returns how far a mesh is from one process."""
    batch = tiny_batch()
    num_items = int((batch["labels"] != -100).sum())
    oracle = build(name)
    expected = oracle(**batch, num_items_in_batch=num_items).loss
    expected.backward()

    mesh = build_mesh(MeshConfig(**sizes), "cpu")
    model = build(name)
    layouts = shard_host(model, mesh)
    rows = {key: value[mesh.rows(4)] for key, value in batch.items()}
    loss = model(**rows, num_items_in_batch=num_items).loss
    loss.backward()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)

    # The experts are stored with gate and up projection apart.
    worst = 0.0
    theirs = {key: parameter.grad for key, parameter in oracle.named_parameters()}
    num_gradients = 0
    for key, parameter in model.named_parameters():
        if parameter.grad is None:
            assert theirs[key] is None, key
            continue
        gradient = whole(parameter.grad).reshape(theirs[key].shape)
        worst = max(worst, float((gradient - theirs[key]).abs().max()))
        num_gradients += 1

    with pytest.raises(ConfigError, match="save_model_on_mesh"):
        model.save_pretrained(folder)
    save_model_on_mesh(model, layouts, mesh, folder)
    loaded = load_model(folder, dtype=torch.float64)
    same = all(
        torch.equal(value, loaded.state_dict()[key]) for key, value in oracle.state_dict().items()
    )
    layer = sparse_layers(model)["decoder", 0]
    local = layer.experts.down_proj.to_local().shape
    return {
        "loss": float((total - expected).abs()),
        "gradients": worst,
        "num_gradients": num_gradients,
        "same": same,
        "local": tuple(local),
    }


def check(result, mesh):
    assert result["loss"] < 1e-5
    assert result["gradients"] < 1e-5
    assert result["num_gradients"] > 30
    assert result["same"]
    assert result["local"] == MESHES[mesh][1]


def rounded(name):
    """Returns the losses of a model whose blocks are gathered in bfloat16, and of one process."""
    batch = tiny_batch()
    losses = []
    for on_mesh in (False, True):
        model = build(name).float()
        rows = slice(0, 4)
        if on_mesh:
            mesh = build_mesh(MeshConfig(ep=2), "cpu")
            shard_host(model, mesh, bfloat16=True)
            rows = mesh.rows(4)
        part = {key: value[rows] for key, value in batch.items()}
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**part, num_items_in_batch=31).loss
        loss.backward()
        losses.append(loss.detach())
    torch.distributed.all_reduce(losses[1])
    gate = sparse_layers(model)["decoder", 0].router.gate
    assert gate.grad.to_local().dtype == torch.float32
    return torch.stack(losses).tolist()


def generates(name):
    """Returns whether two ranks that share experts generate what one process does."""
    inputs = {"input_ids": tiny_batch()["input_ids"], "max_new_tokens": 5, "min_new_tokens": 5}
    model = build(name).eval()
    expected = model.generate(**inputs, do_sample=False)
    shard_host(model, build_mesh(MeshConfig(ep=2), "cpu"), gather=False)
    return torch.equal(model.generate(**inputs, do_sample=False), expected)


def plain_fsdp(name, rank):
    """Returns how far torch's own FSDP is from one process, which averages gradients."""
    batch = tiny_batch()
    oracle, model = build(name), build(name)
    oracle(**batch, num_items_in_batch=31).loss.backward()
    for stack in (model.host.stack(model, name) for name in STACKS):
        for block in stack.layers:
            fully_shard(block)
    fully_shard(model)
    rows = {key: value[2 * rank : 2 * rank + 2] for key, value in batch.items()}
    model(**rows, num_items_in_batch=31).loss.backward()
    theirs = dict(oracle.named_parameters())
    worst = 0.0
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = 2 * whole(parameter.grad)
            worst = max(worst, float((gradient - theirs[key].grad).abs().max()))
    return worst


def on_two_ranks(rank, num_ranks, name, folder):
    """Returns how far two ranks are from one process, by what they do."""
    answers = {mesh: differences(name, MESHES[mesh][0], folder / mesh) for mesh in ("ep", "fsdp")}
    if name == "t5gemma2":  # on a CPU, LayerNorm needs weights and tokens of one dtype
        answers["rounded"] = rounded(name)
    return answers | {"generates": generates(name), "plain fsdp": plain_fsdp(name, rank)}


@pytest.mark.parametrize("name", ["marian", "t5gemma2"])
def test_a_host_on_two_ranks_computes_generates_and_saves_what_one_process_does(name, tmp_path):
    for answer in run_ranks(on_two_ranks, 2, tmp_path, name, tmp_path):
        for mesh in ("ep", "fsdp"):
            check(answer[mesh], mesh)
        whole_loss, loss = answer.get("rounded", (0, 0))
        assert loss == pytest.approx(whole_loss, rel=0.03)
        assert answer["generates"]
        assert answer["plain fsdp"] < 1e-5


def on_four_ranks(rank, num_ranks, name, folder):
    return differences(name, MESHES["both"][0], folder / "saved")


def test_experts_of_a_host_are_sharded_over_both_axes(tmp_path):
    for answer in run_ranks(on_four_ranks, 4, tmp_path, "t5gemma", tmp_path):
        check(answer, "both")


def test_meshes_that_do_not_fit_are_refused():
    model = sparse_host("t5gemma", num_experts=5)
    mesh = build_mesh(MeshConfig(), "cpu")
    with pytest.raises(ConfigError, match="tp 2"):
        shard_host(model, mesh._replace(config=MeshConfig(tp=2)))
    with pytest.raises(ConfigError, match="5 experts"):
        shard_host(model, mesh._replace(config=MeshConfig(ep=2)))
    skipping = sparse_host("m2m_100", num_experts=4)
    skipping.model.decoder.layerdrop = 0.05
    with pytest.raises(ConfigError, match=r"layerdrop is 0\.05"):
        shard_host(skipping, mesh)
    with pytest.raises(ConfigError, match="load_model"):
        shard_host(torch.nn.Linear(2, 2), mesh)
    torch.distributed.destroy_process_group()
