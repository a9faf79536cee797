"""Every private name of torch, and what breaks when it goes."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from moe.kernels import torch_private
from tests.sparse.by_hand import tokens

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


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_without_it_a_traced_product_would_be_a_constant():
    seen = []

    def function(x):
        seen.append(torch_private.is_jit_tracing())
        return x + 1

    torch.jit.trace(function, torch.ones(3), check_trace=False)
    assert seen[0]
    assert not torch_private.is_jit_tracing()


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


def test_without_it_stacks_of_parameters_would_be_written_back_one_by_one():
    targets = [torch.zeros(2, 3), torch.zeros(5)]
    torch_private.copy_each(targets, [torch.ones(2, 3), torch.ones(5)])
    assert all(target.all() for target in targets)


def test_without_it_decoding_would_unpack_every_expert_of_8_bits():
    x = torch.randn(3, 32).bfloat16()
    codes = torch.randint(-127, 128, (7, 32), dtype=torch.int8)
    scale = torch.rand(7).bfloat16()
    product = torch_private.packed_int8_linear(x, codes, scale)
    expected = (x.float() @ codes.float().t()) * scale.float()
    torch.testing.assert_close(product.float(), expected, rtol=2**-7, atol=2**-4)


def test_without_it_decoding_would_unpack_every_expert_of_4_bits():
    x = torch.randn(3, 32).bfloat16()
    codes = torch.randint(0, 16, (64, 32), dtype=torch.int32)
    scales = torch.rand(1, 64, 2).bfloat16()
    packed = torch_private.pack_int4(codes)
    product = torch_private.packed_int4_linear(x, packed, 32, scales)
    scale, zero = scales[0].float().split(1, dim=-1)
    expected = x.float() @ ((codes - 8) * scale + zero).t()
    torch.testing.assert_close(product.float(), expected, rtol=2**-6, atol=2**-3)


def test_without_it_operations_on_lists_could_not_dequantize():
    tree = torch_private.map_tensors(
        torch.Tensor, torch.neg, [1, (torch.ones(3), {"x": torch.ones(2)})]
    )
    assert tree[0] == 1 and tree[1][0].sum() == -3 and tree[1][1]["x"].sum() == -2


@needs_onednn
def test_without_it_large_products_of_a_cpu_take_the_slower_library():
    x = tokens(67, 131).float()
    weight = tokens(103, 131, seed=2).float()
    expected = x.double() @ weight.double().t()
    torch.testing.assert_close(
        torch_private.onednn_linear(x, weight).double(), expected, rtol=0, atol=1e-4
    )


@needs_onednn
def test_without_it_the_flops_of_those_products_are_not_counted():
    with FlopCounterMode(display=False) as counter:
        torch_private.onednn_linear(torch.ones(67, 131), torch.ones(103, 131))
    assert counter.get_total_flops() == 2 * 67 * 131 * 103


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
