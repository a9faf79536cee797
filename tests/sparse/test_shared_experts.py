"""Experts that every token uses. Oracles: the formula of a GEGLU, and a layer without padding.

That they equal a loop over tokens under every router and option is in test_layer.py.
"""

from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from moe import ConfigError
from moe.checkpoint import load_model
from moe.models.configuration import STMoEConfig
from moe.sparse.config import Dispatch, SparseConfig
from moe.surgery.upcycle import Upcycling
from tests.models.tiny import DENSE, FIELDS, tiny_batch, tiny_model
from tests.sparse.layers import build_layer


def tokens():
    return torch.randn(3, 13, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_shared_experts_add_their_outputs_with_weight_1_and_change_no_routing():
    layer = build_layer(num_shared_experts=2)
    routed = build_layer()
    routed.load_state_dict(layer.state_dict(), strict=False)
    y, router = layer(tokens())
    expected, expected_router = routed(tokens())
    for expert in range(2):
        units = slice(11 * expert, 11 * (expert + 1))
        gate, up = (half[units] for half in layer.shared_experts.gate_up_proj[0].chunk(2))
        hidden = F.gelu(tokens() @ gate.t(), approximate="tanh") * (tokens() @ up.t())
        expected = expected + hidden @ layer.shared_experts.down_proj[0, :, units].t()
    torch.testing.assert_close(y, expected)
    assert torch.equal(router.router_logits, expected_router.router_logits)
    assert router.stats.summary() == expected_router.stats.summary()


@pytest.mark.parametrize("dispatch", get_args(Dispatch))
def test_padding_is_zeros_and_reaches_no_gradient_whatever_it_holds(dispatch):
    fields = {"num_shared_experts": 1, "product_bias": True, "expert_bias": "additive"}
    layer = build_layer(dispatch=dispatch, **fields)
    x = tokens()
    mask = torch.rand(3, 13) < 0.6
    x[~mask] = torch.nan
    x.requires_grad_()
    y, _ = layer(x, mask)
    assert not y[~mask].any()

    zeros = x.detach().nan_to_num().requires_grad_()
    alone, _ = layer(zeros, mask)
    torch.testing.assert_close(y, alone)
    gradients = torch.autograd.grad(y.square().sum(), [x, *layer.shared_experts.parameters()])
    expected = torch.autograd.grad(
        alone.square().sum(), [zeros, *layer.shared_experts.parameters()]
    )
    torch.testing.assert_close(gradients, expected)


def test_a_model_with_them_is_saved_loaded_mapped_and_generates(tmp_path):
    model = tiny_model(num_shared_experts=2, eval_capacity_factor=None)
    layers = list(model.sparse_layers())
    assert all(layer.shared_experts.down_proj.shape == (1, 29, 2 * 31) for layer in layers)
    idle = model.config.num_parameters() - model.config.num_active_parameters()
    assert idle == len(layers) * (7 - 2) * 3 * 29 * 31

    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config == model.config
    assert "at most 2 for a token, and 2 shared" in (tmp_path / "README.md").read_text()
    prompt = {"input_ids": tiny_batch()["input_ids"], "max_new_tokens": 5}
    expected = model.generate(**prompt, use_cache=False)
    assert torch.equal(loaded.generate(**prompt), expected)
    with torch.no_grad():
        logits = model(**tiny_batch()).logits
        mapped = load_model(tmp_path, mmap=True)
        torch.testing.assert_close(mapped(**tiny_batch()).logits, logits)


def test_what_cannot_have_shared_experts_is_refused():
    with pytest.raises(ConfigError, match="num_shared_experts is -1"):
        SparseConfig(7, 11, 5, num_shared_experts=-1)
    with pytest.raises(ConfigError, match="num_shared_experts is 1; expected 0"):
        Upcycling(fields={"num_shared_experts": 1}).config(STMoEConfig(**{**FIELDS, **DENSE}))
