"""transformers' functions run our experts, and our kernel those of its models."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moe import ConfigError
from moe.models.experts_interface import set_experts_implementation
from tests.models.tiny import tiny_batch, tiny_model
from tests.sparse.layers import ROUTER_NAMES, assert_all_close, build_layer, losses_and_gradients

SIZES = {"d_model": 8, "d_ff": 12}
"""Rows of 16 bytes, as `grouped_mm` needs them."""


def plain_torch(module, hidden_states, top_k_index, top_k_weights):
    """What the interface says, one choice after the other."""
    output = torch.zeros_like(hidden_states)
    for expert in range(module.num_experts):
        token, choice = (top_k_index == expert).nonzero(as_tuple=True)
        if len(token):
            gate, up = F.linear(hidden_states[token], module.gate_up_proj[expert]).chunk(2, dim=-1)
            hidden = F.linear(module.act_fn(gate) * up, module.down_proj[expert])
            output = output.index_add(0, token, hidden * top_k_weights[token, choice, None])
    return output


def model_values(name):
    """Returns the logits of a model with padding and dropped tokens, and all gradients."""
    model = tiny_model(experts_implementation=name)
    output = model(**tiny_batch())
    output.loss.backward()
    return [output.logits, *(parameter.grad for parameter in model.parameters())]


def test_a_backend_of_transformers_gives_the_bits_of_its_reference(monkeypatch):
    reference = inspect.unwrap(Qwen3MoeExperts.forward)
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, "reference", reference)
    expected = model_values("reference")
    torch.testing.assert_close(expected, model_values(None))
    for name in ("sonicmoe", "deepgemm"):
        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, name, plain_torch)
        for value, wanted in zip(model_values(name), expected, strict=True):
            assert torch.equal(value, wanted), name


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [("batched_mm", torch.float64, 1e-11), ("grouped_mm", torch.float32, 1e-4)],
)
def test_functions_of_transformers_equal_our_products(name, dtype, tolerance):
    x = torch.randn(2, 13, 8, dtype=dtype)
    mask = torch.ones(2, 13, dtype=torch.bool)
    mask[0, 9:] = False
    x = x.masked_fill(~mask[..., None], torch.nan).requires_grad_()
    ids = torch.arange(26).reshape(2, 13)
    for router in ROUTER_NAMES:
        layer = build_layer(router, gated=router != "switch", activation="relu", **SIZES).to(dtype)
        expected = losses_and_gradients(layer, x, mask, ids)
        set_experts_implementation(layer, name)
        assert_all_close(losses_and_gradients(layer, x, mask, ids), expected, atol=tolerance)

    # On a GPU, there are rows without an expert.
    weights = layer.experts.product_weights()
    rows = torch.randn(7, 8, dtype=dtype)
    rows[5:] = torch.nan
    outputs = layer.experts.run_rows(
        rows, torch.tensor([2, 2, 5, 5, 5], dtype=torch.int32), weights
    )[:5]
    (gradient,) = torch.autograd.grad(outputs.sum(), weights.down)
    assert outputs.isfinite().all()
    assert gradient.isfinite().all()


def test_a_model_changes_what_runs_its_experts():
    model = tiny_model(expert_dropout_rate=0.1)
    logits = model(**tiny_batch()).logits
    model.set_experts_implementation("batched_mm")
    assert model.get_experts_implementation()[""] == "batched_mm"
    torch.testing.assert_close(model(**tiny_batch()).logits, logits)
    with pytest.raises(ConfigError, match=r"'batched_mm'; expected 'eager' for .*dropout"):
        model.train()(**tiny_batch())
    model.set_experts_implementation("eager")
    assert torch.equal(model.eval()(**tiny_batch()).logits, logits)
    with pytest.raises(ConfigError, match=r"'fast'; expected one of eager.*sonicmoe"):
        model.set_experts_implementation("fast")
    with pytest.raises(ConfigError, match="'batched_mm'; expected 'eager' with dispatch 'static'"):
        tiny_model(experts_implementation="batched_mm", dispatch="static")


def qwen3_moe(activation="silu"):
    """Returns a tiny model of transformers in float64, and token ids."""
    config = Qwen3MoeConfig(
        vocab_size=31,
        hidden_size=12,
        moe_intermediate_size=11,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=6,
        num_experts=5,
        num_experts_per_tok=2,
        hidden_act=activation,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).double(), torch.randint(1, 31, (3, 7))


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_our_kernel_runs_the_experts_of_a_model_of_transformers(activation):
    model, ids = qwen3_moe(activation)
    values = {}
    for name in ("eager", "stmoe"):
        model.set_experts_implementation(name)
        output = model(input_ids=ids, labels=ids)
        gradients = torch.autograd.grad(output.loss, list(model.parameters()))
        values[name] = [output.logits, *gradients]
    torch.testing.assert_close(values["stmoe"], values["eager"], rtol=0, atol=1e-12)


def test_experts_that_compute_something_else_are_refused(monkeypatch):
    others = {"has_bias": True, "is_transposed": True, "is_concatenated": False}
    others |= {"has_post_expert_norm": True, "act_fn": torch.nn.Tanh(), "_apply_gate": None}
    for name, value in others.items():
        model, ids = qwen3_moe()
        model.set_experts_implementation("stmoe")
        with monkeypatch.context() as patch:
            of_class = name == "_apply_gate"
            experts = Qwen3MoeExperts if of_class else model.model.layers[1].mlp.experts
            patch.setattr(experts, name, value)
            with pytest.raises(ConfigError, match="expected another for Qwen3MoeExperts on cpu"):
                model(input_ids=ids)
