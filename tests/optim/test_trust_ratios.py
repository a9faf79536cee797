"""LARS and LAMB against plain numpy derivations of their formulas, experts one by one."""

from functools import partial

import numpy as np
import pytest
import torch

from moe.optim.lamb import LAMB
from moe.optim.lars import LARS
from moe.optim.parameter_groups import parameter_groups
from tests.models.tiny import tiny_model

DECAY = 0.03
OPTIMIZERS = {
    "lars": partial(LARS, weight_decay=DECAY),
    "lars, unscaled": partial(LARS, weight_decay=DECAY, momentum="unscaled"),
    "lamb": partial(LAMB, weight_decay=DECAY),
}


def norm(x):
    return np.sqrt((x**2).sum())


def lars_oracle(w, grads, rates, *, scaled, adapted=True, beta=0.9, eta=0.001):
    """Runs both definitions of arXiv:1909.09756 on one matrix."""
    v = np.zeros_like(w)
    for g, lr in zip(grads, rates, strict=True):
        ratio, decay = 1.0, DECAY if adapted else 0.0
        if adapted and norm(w) > 0 and norm(g) > 0:
            ratio = eta * norm(w) / (norm(g) + decay * norm(w))
        if scaled:
            v = beta * v + lr * ratio * (g + decay * w)
            w = w - v
        else:
            v = beta * v + (g + decay * w)
            w = w - lr * ratio * v
    return w


def lamb_oracle(w, grads, rates, *, adapted=True):
    """Runs algorithm 2 of arXiv:1904.00962 on one matrix."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, (g, lr) in enumerate(zip(grads, rates, strict=True), start=1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.999**t)
        u = m_hat / (np.sqrt(v_hat) + 1e-6) + (DECAY * w if adapted else 0)
        ratio = 1.0
        if adapted and norm(w) > 0 and norm(u) > 0:
            ratio = norm(w) / norm(u)
            ratio = min(ratio, 1.0) if norm(g) == 0 else ratio
        w = w - lr * ratio * u
    return w


def oracle(name, w, grads, rates, adapted=True):
    if name.startswith("lars"):
        return lars_oracle(w, grads, rates, scaled=name == "lars", adapted=adapted)
    return lamb_oracle(w, grads, rates, adapted=adapted)


def steps(optimizer, parameters, grads, rates):
    for step, lr in enumerate(rates):
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad[step].clone()
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()


RATES = [0.1, 0.3, 0.2, 0.05, 0.4]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["weights", "router"])
def test_steps_equal_the_formulas_expert_by_expert(name, kind):
    rng = np.random.default_rng(0)
    adapted = kind == "weights"
    for shape, batch_dims in (((), 0), ((7,), 0), ((5, 7), 0), ((3, 2, 5, 7), 1), ((3, 7), 1)):
        start, grads = rng.normal(size=shape), rng.normal(size=(len(RATES), *shape))
        if batch_dims:
            grads[:, 1] *= 1e4  # a hot expert
            grads[:, 2] = 0  # and one that has no tokens
        parameter = torch.nn.Parameter(torch.tensor(start))
        group = {"params": [parameter], "batch_dims": batch_dims, "kinds": [kind]}
        steps(OPTIMIZERS[name]([group]), [parameter], [torch.tensor(grads)], RATES)

        if batch_dims:
            expected = [oracle(name, w, grads[:, e], RATES, adapted) for e, w in enumerate(start)]
        else:
            expected = oracle(name, start, grads, RATES, adapted)
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_zeros_give_no_nan_and_ratio_one(name, decay):
    weights = torch.nn.Parameter(torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]], [[3.0, 4.0]]]))
    optimizer = OPTIMIZERS[name]([{"params": [weights], "batch_dims": 1, "weight_decay": decay}])
    grad = torch.tensor([[[1.0, 1.0]], [[0.0, 0.0]], [[0.0, 0.0]]])
    steps(optimizer, [weights], [grad.expand(1, 3, 1, 2)], [0.5])

    # Ratio 1: an expert without tokens shrinks by lr weight_decay and no more.
    assert weights[1].tolist() == pytest.approx(torch.tensor([[3.0, 4.0]]) * (1 - 0.5 * decay))
    assert torch.equal(weights[1], weights[2])
    assert weights.isfinite().all()
    assert (weights[0] < 0).all()


def test_an_expert_that_loses_its_tokens_stops_and_does_not_run_on():
    """LAMB alone would stretch what is left of the moments to the full length of a step."""
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.full((1, 5, 7), 0.5, dtype=torch.float64))
    optimizer = LAMB([{"params": [weights], "batch_dims": 1}], lr=0.01)
    steps(optimizer, [weights], [torch.randn(3, 1, 5, 7, dtype=torch.float64)], [0.01] * 3)
    before = weights.detach().clone()
    steps(optimizer, [weights], [torch.zeros(400, 1, 5, 7, dtype=torch.float64)], [0.01] * 400)
    moved = float((weights.detach() - before).norm() / before.norm())
    assert 0 < moved < 0.2  # 400 whole steps would be 4


@pytest.mark.parametrize("optimizer", [LARS, LAMB])
@pytest.mark.parametrize("skip", [("norms", "biases", "router"), ("biases",)])
def test_skipped_kinds_do_not_see_the_weight_decay(optimizer, skip):
    model = tiny_model(expert_bias="multiplicative")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step = optimizer(parameter_groups(model), lr=0.5, weight_decay=0.1, skip=skip)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step.step()

    kept = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    expected = set()
    for name, parameter in model.named_parameters():
        is_norm = name.endswith("norm.weight")
        is_bias = name.endswith(("experts.bias", "position_bias.table"))
        is_router = name.endswith("router.gate")
        kinds = {"norms": is_norm, "biases": is_bias, "router": is_router}
        if any(kinds[kind] for kind in skip) or not parameter.any():
            expected.add(name)
    assert kept == expected
