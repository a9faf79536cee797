"""Small float64 layers for the tests of this folder; their sizes are distinct primes: D=7, F=11,
E=5.
"""

import torch

from moe.sparse.all_routers import load_routers
from moe.sparse.config import SparseConfig
from moe.sparse.layer import SparseFeedForward

ROUTER_NAMES = load_routers().names()
GATED_NAMES = [
    name for name in ROUTER_NAMES if name != "hash"
]  # the hash of a token's id needs no gate
DROPLESS = {"capacity_factor": None, "eval_capacity_factor": None}
THREE_SLOTS = {
    "capacity_factor": 0.01,
    "eval_capacity_factor": 0.01,
    "min_expert_capacity": 3,
}  # of any group


def build_layer(router="token_choice", seed=0, **fields):
    """Returns a layer in evaluation mode whose router is far from ties and whose experts differ."""
    settings = {
        "d_model": 7,
        "d_ff": 11,
        "num_experts": 5,
        "num_selected_experts": 1 if load_routers().get(router).single else 2,
        "router": router,
        "router_options": {"update_rate": 0.01} if router == "bias_balanced" else {},
        "initializer_scale": 1.0,
        "router_initializer_std": 0.7,
    }
    torch.manual_seed(seed)
    layer = SparseFeedForward(SparseConfig(**{**settings, **fields})).double().eval()
    for name, bias in layer.named_parameters():
        if "experts" in name and "bias" in name:
            torch.nn.init.normal_(bias)
    for buffer in layer.router.buffers():
        buffer.random_(-20, 20)
    return layer


def gradients(total, layer, *inputs):
    """Returns the gradients of a loss for the layer's parameters and the inputs; zeros where there
    is none.
    """
    return torch.autograd.grad(
        total, [*layer.parameters(), *inputs], allow_unused=True, materialize_grads=True
    )


def losses_and_gradients(layer, x, mask=None, ids=None):
    """Returns the output of a layer and the gradients of a loss that all of it enters."""
    torch.manual_seed(5)
    y, output = layer(x, mask, token_ids=ids)
    losses = output.losses
    loss = y.square().sum() + losses.load_balance_loss + losses.router_z_loss
    return [y.detach(), *gradients(loss, layer, x)]


def assert_all_close(ours, theirs, atol=1e-11):
    """Compares two sequences of tensors."""
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)
