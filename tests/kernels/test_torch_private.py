"""Every private name of torch, and what breaks when it goes."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from moe.kernels import torch_private

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has one library"
)


@pytest.fixture(scope="module")
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_it_a_product_inside_torch_func_would_have_no_gradient():
    seen = []

    def function(x):
        seen.append(torch_private.is_in_functorch())
        return x.square().sum()

    torch.func.grad(function)(torch.ones(3))
    assert seen == [True]
    assert not torch_private.is_in_functorch()


def test_without_it_a_compiled_layer_would_have_the_slots_of_an_exported_one():
    class Scale(torch.nn.Module):
        def forward(self, x):
            return 2 * x if torch_private.is_exporting() else 3 * x

    one = torch.ones(1)
    assert torch.export.export(Scale(), (one,)).module()(one) == 2
    assert torch.compile(Scale(), fullgraph=True, backend="eager")(one) == 3
    assert Scale()(one) == 3


def test_without_it_a_checkpointed_layer_could_be_recomputed_without_its_mask():
    seen = []

    def function(x):
        seen.append(torch_private.is_in_checkpoint())
        return x.square()

    x = torch.ones(3, requires_grad=True)
    checkpoint(function, x, use_reentrant=False)
    function(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        function(x)  # hooks that are not a checkpoint's
    assert seen == [True, False, False]


def test_without_it_nothing_stops_logits_that_are_not_finite_on_an_accelerator():
    torch_private.assert_on_device(torch.tensor(True), "holds")
    with pytest.raises(RuntimeError, match="does not hold"):
        torch_private.assert_on_device(torch.tensor(False), "does not hold")


@needs_onednn
def test_without_it_the_flops_of_those_products_are_not_counted():
    with FlopCounterMode(display=False) as counter:
        torch_private.onednn_linear(torch.ones(67, 131), torch.ones(103, 131))
    assert counter.get_total_flops() == 2 * 67 * 131 * 103


@needs_onednn
def test_without_them_weights_could_not_be_packed():
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *arguments, **options):
            raise AssertionError("a function of torch was replaced")

    weight = torch.randn(103, 131)
    narrow = weight.bfloat16() if torch_private.has_bfloat16() else weight
    for matrix in (weight, narrow):
        packed = torch_private.pack_matrix(matrix)
        assert packed.is_mkldnn
        assert torch.equal(packed.to_dense(), matrix)
    with torch_private.without_torch_function():
        assert torch.equal(weight.as_subclass(Refusing) + 1, weight + 1)


def test_without_them_torch_export_could_not_save_a_model_whose_outputs_are_records(tmp_path):
    # Records and their list are registered when moe.models.outputs is imported.
    from moe.models.outputs import RouterRecords
    from moe.sparse.losses import BalanceTotals, RouterLosses

    zeros = RouterLosses(*[torch.zeros(5)] * len(RouterLosses._fields))
    leaves, spec = torch.utils._pytree.tree_flatten((RouterRecords([]), zeros))
    assert len(leaves) == len(RouterLosses._fields)
    text = torch.utils._pytree.treespec_dumps(spec)
    assert torch.utils._pytree.treespec_loads(text) == spec
    assert "moe.sparse.losses.RouterLosses" in text

    _, unregistered = torch.utils._pytree.tree_flatten(BalanceTotals(*[torch.zeros(5)] * 2))
    with pytest.raises(NotImplementedError, match=r"Can't serialize .*BalanceTotals"):
        torch.utils._pytree.treespec_dumps(unregistered)


def test_without_them_no_mesh_of_the_library_can_be_built(one_rank):
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"))
    flat = torch_private.flatten_mesh_axes(mesh["b", "c"], "flat")
    assert (flat.mesh_dim_names, flat.shape) == (("flat",), (1,))

    joined = torch_private.join_meshes([mesh["a"], flat])
    assert (joined.mesh_dim_names, joined.shape) == (("a", "flat"), (1, 1))

    levels = torch_private.split_mesh_axis(mesh["c"], (1, 1), ("across", "inside"))
    assert (levels.mesh_dim_names, levels.shape) == (("across", "inside"), (1, 1))
    assert levels["inside"].get_group() is not None


def test_without_it_ranks_could_not_agree_on_who_reports_an_error(one_rank):
    assert torch_private.default_store().add("tests/torch_private", 2) == 2


def test_without_it_factored_second_moments_do_not_know_fsdp_over_tensor_parallel(one_rank):
    placement = torch_private.StridedShard(1, split_factor=2)
    assert (placement.dim, placement.split_factor) == (1, 2)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("d",))
    assert distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)]).placements == (Shard(0),)
