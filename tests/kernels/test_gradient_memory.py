"""The memory that gradients of expert weights lie in: where it comes from changes no number."""

import pytest
import torch

from moe.kernels import cpu_experts, host_memory
from moe.kernels.host_memory import empty_in_few_pages
from tests.sparse.expert_loop import problem, tiny
from tests.sparse.test_experts import run_engine


@pytest.mark.parametrize("keeps_all", [False, True])
def test_memory_in_few_pages_is_writable_and_outlives_its_maker(keeps_all, monkeypatch):
    monkeypatch.setattr(host_memory._Setting, "keeps_all", keeps_all)
    for dtype in (torch.float32, torch.bfloat16):
        like = torch.zeros(3, 2**19, dtype=dtype)
        memory = empty_in_few_pages(like)
        assert (memory.shape, memory.dtype) == (like.shape, like.dtype)
        assert memory.fill_(2).sum().item() == 3 * 2**20
        assert memory.clone().equal(memory)


def test_gradients_in_few_pages_are_those_in_others(monkeypatch):
    config = tiny("gelu_pytorch_tanh", True, "additive", d_model=7, d_ff=11)
    inputs, rows = problem(config, num_tokens=13, num_rows=23)
    made = []

    def make(like):
        made.append(like.shape)
        return empty_in_few_pages(like)

    monkeypatch.setattr(host_memory, "_HUGE_PAGE", 1)
    monkeypatch.setattr(cpu_experts, "empty_in_few_pages", make)
    gradients = []
    for few_rows in (0, 2**30):
        monkeypatch.setattr(cpu_experts, "_FEW_ROWS", few_rows)
        gradients.append(
            torch.autograd.grad(run_engine(inputs, rows, config).square().sum(), inputs)
        )
        assert len(made) == (0 if few_rows == 0 else 3)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
