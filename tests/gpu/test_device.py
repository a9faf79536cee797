"""The device computes what the CPU computes: layers, models, decoding and optimizers.

`make gpu` runs these tests on a GPU. Without one the same code runs on the CPU, which compares it
with itself.
"""

import copy
from typing import Any

import pytest
import torch

from benchmarks.models.gpu import (
    COMPARED_STEPS,
    FORMS,
    build_model,
    decode,
    eager_step,
    start_decoding,
)
from benchmarks.models.model import switch_config
from moe.models.modeling import STMoEForConditionalGeneration
from moe.optim.optimizers import OPTIMIZERS
from moe.optim.parameter_groups import parameter_groups
from moe.training.recipe import OptimRecipe
from tests.benchmarks.tiny_case import TINY
from tests.models.tiny import tiny_batch, tiny_model
from tests.sparse.layers import ROUTER_NAMES, THREE_SLOTS, build_layer, losses_and_gradients

pytestmark = pytest.mark.gpu

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")

# One kernel for the products of all experts: in bfloat16, on Hopper and newer GPUs.
HAS_GROUPED_KERNEL = HAS_GPU and torch.cuda.get_device_capability() >= (9, 0)

# Rows of 16 bytes, which grouped products need.
SIZES: dict[str, Any] = {"d_model": 16, "d_ff": 32, "num_experts": 5}


def draw_inputs(dtype):
    """Returns tokens <dtype>[2, 13, 16], their mask and their ids."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 13, SIZES["d_model"], generator=generator).to(dtype)
    mask = torch.rand(2, 13, generator=generator) < 0.8
    ids = torch.randint(2, 131, (2, 13), generator=generator)
    return x, mask, ids


@pytest.mark.parametrize(
    "capacity", [{"capacity_factor": None}, THREE_SLOTS], ids=["dropless", "slots"]
)
@pytest.mark.parametrize("router", ROUTER_NAMES)
def test_a_layer_and_its_gradients_are_those_of_float64_on_the_cpu(router, capacity):
    layer = build_layer(router, **SIZES, **capacity)
    x, mask, ids = draw_inputs(torch.float64)
    expected = losses_and_gradients(layer, x.requires_grad_(), mask, ids)

    on_device = copy.deepcopy(layer).float().to(DEVICE)
    inputs = x.detach().float().to(DEVICE).requires_grad_()
    actual = losses_and_gradients(on_device, inputs, mask.to(DEVICE), ids.to(DEVICE))
    for tensor, reference in zip(actual, expected, strict=True):
        scale = float(reference.abs().max()) + 1e-6
        torch.testing.assert_close(tensor.double().cpu(), reference, rtol=0, atol=2e-5 * scale)


def test_bfloat16_products_round_as_their_format_does():
    layer = build_layer(**SIZES, capacity_factor=None)
    x, mask, ids = draw_inputs(torch.float64)
    expected, *_ = losses_and_gradients(layer, x.requires_grad_(), mask, ids)

    on_device = copy.deepcopy(layer).float().to(DEVICE)
    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16):
        actual, _ = on_device(
            x.detach().float().to(DEVICE), mask.to(DEVICE), token_ids=ids.to(DEVICE)
        )
    error = (actual.double().cpu() - expected).norm() / expected.norm()
    assert 0 < error < 1e-2


def test_a_model_saved_on_the_cpu_gives_its_logits_and_tokens_on_the_device(tmp_path):
    model = tiny_model(d_model=32, d_kv=8, d_ff=32)
    model.save_pretrained(tmp_path)
    loaded: Any = STMoEForConditionalGeneration.from_pretrained(tmp_path)
    loaded.to(DEVICE).eval()

    batch = tiny_batch()
    on_device = {name: tensor.to(DEVICE) for name, tensor in batch.items()}
    with torch.no_grad():
        expected = model(**batch)
        actual = loaded(**on_device)
    torch.testing.assert_close(actual.logits.cpu(), expected.logits, rtol=0, atol=2e-4)
    torch.testing.assert_close(actual.loss.cpu(), expected.loss, rtol=1e-5, atol=0)

    del batch["labels"], on_device["labels"]
    settings = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
    tokens = loaded.generate(**on_device, **settings).cpu()
    assert tokens.tolist() == model.generate(**batch, **settings).tolist()


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_an_optimizer_takes_the_same_steps(name):
    models: list[Any] = [tiny_model(d_model=32, d_kv=8, d_ff=32) for _ in range(2)]
    models[1].to(DEVICE)
    recipe = OptimRecipe(optimizer=name)
    for model in models:
        optimizer = OPTIMIZERS.get(name).build(
            parameter_groups(model),
            clipping_threshold=recipe.clipping_threshold,
            weight_decay=recipe.weight_decay,
        )
        for seed in range(3):
            batch = {key: tensor.to(model.device) for key, tensor in tiny_batch(seed=seed).items()}
            optimizer.zero_grad()
            model(**batch).loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = 0.01
            optimizer.step()

    # Muon iterates in bfloat16 on a GPU; then Adam's step of a rare token may change its sign.
    tolerance = 0.15 if name == "muon" else 1e-3
    start = tiny_model(d_model=32, d_kv=8, d_ff=32).parameters()
    for ours, theirs, before in zip(*(m.parameters() for m in models[::-1]), start, strict=True):
        moved = (theirs - before).norm().item()
        assert (ours.cpu() - theirs).norm().item() <= tolerance * moved


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the compiler's advice
@pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled")  # likewise
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated")  # the compiler itself
@pytest.mark.skipif(not HAS_GPU, reason="captures CUDA graphs")
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_every_form_of_a_decoding_step_gives_the_tokens_of_the_eager_one(form):
    # Compiled code rounds bfloat16 elsewhere, and two tokens are often within that of each other.
    model = build_model(switch_config(TINY, 3), DEVICE)
    decoding = start_decoding(model.float() if form == "compiled" else model, TINY, 2, DEVICE)
    expected = decode(decoding, eager_step(decoding))
    decoding.restore()
    assert decode(decoding, FORMS[form](decoding)) == expected
    assert len(expected) == COMPARED_STEPS


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.skipif(not HAS_GROUPED_KERNEL, reason="torch counts rows on the host there")
@pytest.mark.parametrize("router", ROUTER_NAMES)
def test_the_host_never_waits_for_a_layer(router):
    layer = build_layer(router, **SIZES, capacity_factor=None).bfloat16().to(DEVICE)
    x, mask, ids = (tensor.to(DEVICE) for tensor in draw_inputs(torch.bfloat16))
    losses_and_gradients(layer, x.requires_grad_(), mask, ids)

    try:
        torch.cuda.set_sync_debug_mode("error")
        y, output = layer(x, mask, token_ids=ids)
        (y.square().sum() + output.losses.load_balance_loss).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
