"""No tensor of the layer is as large as the oracle's masks [T, E, C], neither forward nor backward."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe import SparseConfig, SparseFeedForward
from moe.sparse.all_routers import load_routers

TOKENS, EXPERTS, D, F = 211, 23, 3, 5


class LargestTensor(TorchDispatchMode):
    """Remembers how many numbers the largest result of any operation has."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


@pytest.mark.parametrize("dispatch", ["ragged", "static"])
@pytest.mark.parametrize("router", load_routers().names())
def test_nothing_is_larger_than_the_logits_and_the_rows(router, dispatch, one_thread):
    choices = 1 if load_routers().get(router).single else 2
    fields = {"dispatch": dispatch, "capacity_factor": 5.0, "group_size": TOKENS}
    config = SparseConfig(D, F, EXPERTS, choices, router=router, **fields)
    layer, x = SparseFeedForward(config), torch.randn(1, TOKENS, D, requires_grad=True)
    with LargestTensor() as largest:
        y, output = layer(x, token_ids=torch.arange(TOKENS)[None])
        (y.sum() + output.losses.load_balance_loss + output.losses.router_z_loss).backward()
    capacity = output.plan.capacity
    rows = EXPERTS * capacity * 2 * F
    assert capacity == 45
    assert TOKENS * EXPERTS <= largest.numel <= max(rows + 2 * F, 2 * TOKENS * EXPERTS)
    assert largest.numel < TOKENS * EXPERTS * capacity / 10
