"""Muon against singular values in numpy, torch's own Muon, and separate experts."""

import numpy as np
import pytest
import torch

from moe.optim.muon import COEFFICIENTS, NUM_ITERATIONS, Muon, orthogonalize
from moe.optim.parameter_groups import parameter_groups
from tests.models.tiny import tiny_model
from tests.optim.test_trust_ratios import steps

RATES = [0.1, 0.3, 0.2, 0.05, 0.4]


def orthogonal_oracle(x):
    """The iteration changes the singular values of x / |x| and nothing else."""
    a, b, c = COEFFICIENTS
    U, s, Vt = np.linalg.svd(x, full_matrices=False)
    s = s / max(np.sqrt((s**2).sum()), 1e-30)
    for _ in range(NUM_ITERATIONS):
        s = a * s + b * s**3 + c * s**5
    return U @ np.diag(s) @ Vt


def muon_oracle(w, grads, rates, *, mu=0.95, decay=0.0):
    v = np.zeros_like(w)
    for g, lr in zip(grads, rates, strict=True):
        v = mu * v + g
        u = 0.2 * np.sqrt(max(w.shape)) * orthogonal_oracle(g + mu * v) if g.any() else 0
        w = (1 - lr * decay) * w - lr * u
    return w


@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (1, 7), (3, 5, 7), (3, 2, 7, 5)])
def test_singular_values_come_near_one_and_vectors_stay(shape):
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    X = orthogonalize(x)
    matrices = x.reshape(-1, *shape[-2:]).numpy()
    expected = np.reshape([orthogonal_oracle(matrix) for matrix in matrices], shape)
    np.testing.assert_allclose(X, expected, rtol=1e-11, atol=1e-12)
    assert (np.linalg.svd(X)[1] < 1.25).all()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_each_expert_takes_the_steps_of_the_formula(decay):
    rng = np.random.default_rng(0)
    for shape in ((3, 5, 7), (3, 7, 5)):
        start, grads = rng.normal(size=shape), rng.normal(size=(len(RATES), *shape))
        grads[:, 1] *= 1e4  # a hot expert
        grads[2:, 2] = 0  # and one that loses its tokens: it shrinks and does not move
        stack = torch.nn.Parameter(torch.tensor(start))
        optimizer = Muon([{"params": [stack], "batch_dims": 1}], weight_decay=decay)
        steps(optimizer, [stack], [torch.tensor(grads)], RATES)
        expected = [muon_oracle(w, grads[:, e], RATES, decay=decay) for e, w in enumerate(start)]
        np.testing.assert_allclose(stack.detach(), expected, rtol=1e-9, atol=1e-11)


def test_a_matrix_takes_the_steps_of_torchs_own_muon_which_rounds_to_bfloat16():
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(48, 64)) for _ in range(2))
    start = ours.detach().clone()
    grads = torch.randn(20, 48, 64)
    steps(Muon([ours]), [ours], [grads], [0.02] * 20)
    muon = torch.optim.Muon([theirs], weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    steps(muon, [theirs], [grads], [0.02] * 20)
    moved = (theirs - start).norm().item()
    assert (ours - theirs).norm().item() < 0.02 * moved


@pytest.mark.parametrize("kind", ["embeddings", "router", "biases", "norms"])
def test_other_kinds_take_the_steps_of_adam(kind):
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(5, 7)) for _ in range(2))
    grads = torch.randn(len(RATES), 5, 7)
    muon = Muon([{"params": [ours], "kinds": [kind]}], weight_decay=0.1)
    steps(muon, [ours], [grads], RATES)
    decay = 0.1 if kind == "embeddings" else 0.0
    adam = torch.optim.AdamW([theirs], betas=(0.9, 0.95), weight_decay=decay)
    steps(adam, [theirs], [grads], RATES)
    torch.testing.assert_close(ours, theirs)


def test_tables_of_tokens_routers_and_vectors_are_not_orthogonalized():
    model = tiny_model(expert_bias="multiplicative")
    optimizer = Muon(parameter_groups(model))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    by_adam = {name for name, p in model.named_parameters() if "step" in optimizer.state[p]}
    others = ("norm.weight", "router.gate", "experts.bias", "position_bias.table")
    tables = ("embed_tokens.weight", "lm_head.weight")
    assert by_adam == {n for n, _ in model.named_parameters() if n.endswith(others + tables)}
