"""Layers and models on tensors of an accelerator that does not exist: shapes and dtypes, no values.

    python -m tests.on_fake_gpu CASE [CASE ...]

What waits for a device cannot run here, since there are no values to wait for; and the mode of
tests/synchronisation.py refuses every operation of that kind. torch's wheel for CPUs has no autograd
for fake CUDA tensors, but for those of a device of one's own. A process has one such device for
good, so the cases have a process of their own.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration
from transformers import EncoderDecoderCache, StaticCache

from moe import STMoEConfig
from moe.optim.optimizers import OPTIMIZERS
from moe.optim.parameter_groups import parameter_groups
from moe.sparse.config import SparseConfig
from moe.sparse.layer import SparseFeedForward
from moe.training.recipe import OptimRecipe, Recipe, TrainingRecipe
from tests.launches import Launches
from tests.models.tiny import checkpointed, tiny_batch, tiny_model
from tests.sparse.layers import ROUTER_NAMES, THREE_SLOTS, build_layer
from tests.synchronisation import NoSynchronisation
from tests.training.one_step import train_step

DEVICE = "gpu"
AUTOCAST = torch._C.DispatchKey.AutocastPrivateUse1

# Rows of 16 bytes, as grouped products want them.
SIZES = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "expert_dropout_rate": 0.1}


class _FakeBackend(backend_registration._DummyBackendModule):
    """What torch asks of the module of a device."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def fake_like(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Returns a fake tensor of the shape of another, a parameter if that is one."""
    if dtype is None or not tensor.is_floating_point():
        dtype = tensor.dtype
    fake = torch.empty(tensor.shape, dtype=dtype, device=DEVICE)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def to_fake(module: Any, dtype: torch.dtype | None = torch.bfloat16) -> Any:
    """Puts fake tensors into the place of parameters and buffers; what is shared stays shared."""
    fakes: dict[int, Tensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    fake = fakes.get(id(tensor))
                    tensors[name] = fakes[id(tensor)] = (
                        fake_like(tensor, dtype) if fake is None else fake
                    )
    return module


def fake_batch() -> dict[str, Tensor]:
    return {name: fake_like(tensor, None) for name, tensor in tiny_batch().items()}


def fake_cache(config: STMoEConfig, length: int) -> StaticCache:
    """Returns a cache whose counters are fake, too: a constant would be moved for real."""
    cache = StaticCache(config=config, max_cache_len=length)
    for layer in cache.layers:
        layer.cumulative_length = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    return cache


# ---- cases ----


def run_layers() -> None:
    """Runs a layer with every router, forward and backward, with padding and a capacity."""
    for router in ROUTER_NAMES:
        fields = {"expert_bias": "additive", "expert_dropout_rate": 0.1, **THREE_SLOTS}
        real = build_layer(router, d_model=16, d_ff=32, **fields).train()
        with FakeTensorMode():
            layer = to_fake(real)
            x = torch.randn(2, 13, 16, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
            mask = torch.ones(2, 13, device=DEVICE, dtype=torch.bool)
            ids = torch.zeros(2, 13, device=DEVICE, dtype=torch.int64)
            with NoSynchronisation():
                y, output = layer(x, mask, token_ids=ids)
                losses = output.losses
                loss = y.sum() + losses.load_balance_loss + losses.router_z_loss
                loss.backward()
        assert x.grad is not None and x.grad.device.type == DEVICE


def run_launches() -> None:
    """Counts what a step of the layer of docs/guides/speed.md launches, and prints where."""
    with torch.device("meta"):
        layer = SparseFeedForward(
            SparseConfig(
                d_model=1024,
                d_ff=2816,
                num_experts=32,
                num_selected_experts=2,
                gated=True,
                group_size=8192,
                router_options={"second_expert_policy": "all"},
                capacity_factor=None,
            )
        )
    with FakeTensorMode():
        layer = to_fake(layer)
        x = torch.randn(1, 8192, 1024, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for most, report in ((89, False), (164, True)):  # see docs/guides/speed.md
            with NoSynchronisation(), Launches(DEVICE) as launches:
                y, output = layer(x, report=report)
                ends = [y]
                if report:
                    ends += [output.losses.load_balance_loss, output.losses.router_z_loss]
                cotangents = [torch.empty_like(end) for end in ends]
                torch.autograd.grad(ends, [x, *layer.parameters()], cotangents)
            sys.stdout.write(launches.table())
            assert launches.kernels.total() <= most


def run_training_steps() -> None:
    """Runs updates of a model with every optimizer of ours, in float32 under autocast.

    That of AdamW is torch's: it counts steps in tensors of the CPU, which fake ones cannot be.
    """
    for name in sorted({*OPTIMIZERS.names()} - {"adamw"}):
        _update(name)
    _update("adafactor", micro_batch_size=2, activation_checkpointing=True)
    _update("adafactor", {"capacity_factor": None})


def _update(optimizer_name: str, fields: dict[str, Any] | None = None, **training: Any) -> None:
    optim = OptimRecipe(optimizer=optimizer_name)
    recipe = Recipe(
        optim=optim,
        training=TrainingRecipe(steps=5, batch_size=4, precision="bfloat16", **training),
    )
    model = tiny_model(**SIZES, group_size=13, **(fields or {})).train()
    if recipe.training.activation_checkpointing:
        model = checkpointed(model)

    with FakeTensorMode():
        model = to_fake(model, None)
        optimizer = OPTIMIZERS.get(optim.optimizer).build(
            parameter_groups(model),
            clipping_threshold=optim.clipping_threshold,
            weight_decay=optim.weight_decay,
        )
        batch = fake_batch()
        train_step(model, optimizer, recipe, batch, 0)  # state is made at the first step
        with NoSynchronisation():
            metrics = train_step(model, optimizer, recipe, batch, 1)
    assert metrics.loss.device.type == DEVICE


def run_captured_step() -> None:
    """Runs what a CUDA graph of a training step holds: without capacity, AdamW's count on the device."""
    model = tiny_model(**SIZES, capacity_factor=None).train()
    with FakeTensorMode():
        model = to_fake(model, None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        batch = fake_batch()

        def step() -> None:
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        step()  # a warm-up, which allocates state and gradients
        with NoSynchronisation():
            step()


@torch.no_grad()
def run_decoding() -> None:
    """Runs the step of decoding through a static cache, and the choice of the next token."""
    model = tiny_model(**SIZES, eval_capacity_factor=None)
    with FakeTensorMode():
        model = to_fake(model)
        batch = fake_batch()
        mask = batch["attention_mask"]
        caches = [fake_cache(model.config, size) for size in (17, 13)]
        given = {"attention_mask": mask, "past_key_values": EncoderDecoderCache(*caches)}
        given["encoder_outputs"] = model.get_encoder()(batch["input_ids"], attention_mask=mask)
        ids = torch.zeros(4, 1, dtype=torch.int64, device=DEVICE)

        # The first step fills the cross-attention.
        model(decoder_input_ids=ids, **given)
        with NoSynchronisation():
            output = model(decoder_input_ids=ids, output_router_logits=False, **given)
            next_ids = output.logits.argmax(-1)
    assert next_ids.shape == (4, 1)


CASES: dict[str, Callable[[], None]] = {
    "layers": run_layers,
    "launches": run_launches,
    "training_steps": run_training_steps,
    "captured_step": run_captured_step,
    "decoding": run_decoding,
}


def sum_as_on_cuda(
    x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns a sum as CUDA's autocast has it: in float32, unless a dtype is asked for."""
    if dtype is None and x.is_floating_point():
        dtype = torch.float32
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(AUTOCAST)):
        return torch.ops.aten.sum.dim_IntList(x, dim, keepdim, dtype=dtype)


if __name__ == "__main__":
    backend_registration._setup_privateuseone_for_python_backend(DEVICE, _FakeBackend())

    # Autocast sets the dtype of the experts' products and of sums; else it changes nothing here.
    autocast = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    autocast.fallback(torch.library.fallthrough_kernel)
    sums = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    sums.impl("sum.dim_IntList", sum_as_on_cuda)
    for case in sys.argv[1:]:
        CASES[case]()
