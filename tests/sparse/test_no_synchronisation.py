"""The path of a GPU: no host waits for a device, and its numbers are those of a CPU's kernel."""

import pytest
import torch

from moe.sparse import dispatch
from moe.sparse.dispatch import ChoiceDispatcher
from tests.processes import run_command
from tests.sparse.layers import (
    ROUTER_NAMES,
    THREE_SLOTS,
    assert_all_close,
    build_layer,
    losses_and_gradients,
)
from tests.synchronisation import NoSynchronisation, WaitsError


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Sends the layers of a test to the grouped products that other devices have."""
    monkeypatch.setattr(dispatch, "has_fused_experts", lambda x: False)


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow
def test_no_host_waits_for_a_device():
    """On tensors without values: forward, backward and update, and a step of decoding."""
    ended = run_command("tests.on_fake_gpu", "layers", "training_steps", "decoding")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_a_layer_launches_few_kernels_and_a_cuda_graph_can_hold_a_training_step():
    """Counted offline; see tests/launches.py."""
    ended = run_command("tests.on_fake_gpu", "launches", "captured_step")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 1],
        lambda x: torch.bincount(x.long()),
        lambda x: x.repeat_interleave(x.long()),
    ],
    ids=["item", "bools", "bincount", "repeat"],
)
def test_the_mode_sees_what_waits(wait):
    with NoSynchronisation(), pytest.raises(WaitsError):
        wait(torch.arange(3.0))


@pytest.mark.parametrize("router", ROUTER_NAMES)
def test_a_row_for_every_choice_computes_what_the_kernel_of_a_cpu_does(router, monkeypatch):
    layer = build_layer(router, expert_bias="additive", gated=True, **THREE_SLOTS)
    x = torch.randn(2, 13, 7, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 13, dtype=torch.bool)
    mask[1, 9:] = False
    ids = torch.randint(0, 997, (2, 13))
    expected = losses_and_gradients(layer, x, mask, ids)

    monkeypatch.setattr(dispatch, "has_fused_experts", lambda x: False)
    assert isinstance(layer.start_dispatcher(layer(x, token_ids=ids)[1].plan), ChoiceDispatcher)
    assert_all_close(losses_and_gradients(layer, x, mask, ids), expected)


@pytest.mark.parametrize("shape", [(1, 1), (1, 0), (0, 13)], ids=["one", "none", "no sequence"])
def test_a_row_for_every_choice_of_few_tokens(shape, as_on_a_gpu):
    layer = build_layer()
    x = torch.randn(*shape, 7, dtype=torch.float64, requires_grad=True)
    y, _ = layer(x, torch.zeros(shape, dtype=torch.bool))
    assert y.shape == x.shape
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert not y.any() and not gradient.any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_the_path_of_a_gpu_compiles_into_one_graph(as_on_a_gpu, fresh_compiler):
    """As on a Hopper GPU in bfloat16: grouped products, and what stands between them."""
    layer = build_layer(
        d_model=16, d_ff=24, gated=True, expert_bias="multiplicative", **THREE_SLOTS
    ).to(torch.bfloat16)
    x = torch.randn(2, 13, 16, dtype=torch.bfloat16, requires_grad=True)
    inputs = (x, torch.ones(2, 13, dtype=torch.bool), None)
    expected = losses_and_gradients(layer, *inputs)
    compiled_layer = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled = losses_and_gradients(compiled_layer, *inputs)
    for a, b in zip(compiled, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05 * float(b.abs().max()))
