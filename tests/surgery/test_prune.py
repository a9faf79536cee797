"""Pruning: a cut model computes what a masked one does, and scores follow from the blackboard."""

import math

import pytest
import torch

from moe import STMoEForConditionalGeneration
from moe.commands.prune import removed_rows
from moe.errors import ConfigError
from moe.models.configuration import STMoEConfig
from moe.sparse.editing import edit_routing, sparse_layers
from moe.sparse.edits import RerouteExperts
from moe.surgery.expert_statistics import expert_statistics
from moe.surgery.prune import (
    SCORES,
    Pruning,
    best_experts,
    choose_experts,
    prune_checkpoint,
    share_budget,
)
from tests.models.tiny import DENSE, tiny_batch, tiny_model
from tests.surgery.tiny_prefixes import MK, add_prefixes, batch_with, parent_model

DROPLESS = {"capacity_factor": None, "eval_capacity_factor": None}
LAYERS = [("encoder", 0), ("decoder", 0)]


def prune(model, kept, folder):
    """Returns the model that keeps some experts of each layer, through files."""
    (folder / "pruned").mkdir(parents=True)
    model.save_pretrained(folder / "whole")
    kept = {key: torch.as_tensor(experts) for key, experts in kept.items()}
    prune_checkpoint(folder / "whole", folder / "pruned", kept)
    return STMoEForConditionalGeneration.from_pretrained(folder / "pruned").eval()


def logits(model, **changes):
    batch = tiny_batch()
    return model(**{**batch, **changes}).logits[batch["labels"] != -100]


def exact_model(**fields):
    """Returns a model whose logits have no rounding: each is twice one coordinate of the token.

    Products of matrices of different heights may round differently.
    """
    model = tiny_model(**DROPLESS, **fields)
    with torch.no_grad():
        for layer in sparse_layers(model).values():
            layer.router.gate.copy_(2 * torch.eye(7, 30)[:, :29].roll(1, dims=1))
    return model


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"router_options": {"normalize_gates": False}},
        {"router": "switch", "router_options": {}, "num_selected_experts": 1},
        {"router": "bias_balanced", "router_options": {}},
        {"expert_bias": "multiplicative", "feed_forward_proj": "relu", "num_shared_experts": 1},
    ],
)
def test_a_cut_model_equals_a_masked_one(tmp_path, fields):
    model = exact_model(**fields)
    for layer in sparse_layers(model).values():
        if model.config.router == "bias_balanced":
            layer.router.load_steps.random_(-99, 99)
    kept = {("encoder", 0): [0, 2, 5], ("decoder", 0): [1, 2, 3, 6]}
    pruned = prune(model, kept, tmp_path)
    assert pruned.config.num_parameters() == sum(p.numel() for p in pruned.parameters())
    masks = {}
    for key, experts in kept.items():
        masks[key] = RerouteExperts(*(e for e in range(7) if e not in experts))
    with edit_routing(model, masks):
        masked = logits(model)
    assert torch.equal(logits(pruned), masked)


def test_experts_of_a_prefix_stay(tmp_path):
    model = add_prefixes(parent_model(**DROPLESS), [MK])
    batch = batch_with(MK, MK)
    chosen = choose_experts(model, [batch], Pruning(budget=7, floor=3))
    drawn = choose_experts(model, [], Pruning("random", keep=3))
    for scores in (*chosen.scores.values(), *drawn.scores.values()):
        assert len(scores) == 7
    assert sum(len(kept) for kept in chosen.kept.values()) == 7 + 2 * 3
    assert all(kept[-3:].tolist() == [7, 8, 9] for kept in chosen.kept.values())
    for row in removed_rows(chosen):
        assert "of 7" in row[1] and "10 (" not in row[2]

    pruned = prune(model, chosen.kept, tmp_path)
    assert pruned.config.prefix_experts == [MK]
    masks = {}
    for key, kept in chosen.kept.items():
        masks[key] = RerouteExperts(*(e for e in range(10) if e not in kept.tolist()))
    with edit_routing(model, masks):
        masked = model(**batch).logits
    is_target = batch["labels"] != -100
    torch.testing.assert_close(pruned(**batch).logits[is_target], masked[is_target])

    with pytest.raises(ConfigError, match="less than the 7 there are"):
        Pruning(keep=7).numbers(model)


# ---- which experts ----


def test_scores_are_their_formulas():
    for key, statistics in expert_statistics(exact_model(), [tiny_batch()]).items():
        scores = {name: score(statistics) for name, score in SCORES.items()}
        for e in range(7):
            load, first = int(statistics.load[e]), int(statistics.first_load[e])
            share = first / int(statistics.num_tokens)
            confidence = float(statistics.first_gate_sum[e]) / max(first, 1)
            expected = {
                "reap": float(statistics.gated_norm_sum[e]) / max(load, 1),
                "frequency": share,
                "importance": share * math.exp(confidence),
            }
            actual = {name: float(scores[name][e]) for name in scores}
            assert actual == pytest.approx(expected), (key, e)


def test_ties_go_to_the_first_expert():
    assert best_experts(torch.tensor([1.0, 3, 1, 1, 0]), 3).tolist() == [0, 1, 2]


def test_random_scores_follow_from_the_seed():
    model = tiny_model()
    choices = [choose_experts(model, [], Pruning("random", keep=3, seed=s)) for s in (1, 1, 2)]
    first, again, other = (choice.scores for choice in choices)
    assert torch.equal(first["decoder", 0], again["decoder", 0])
    assert not torch.equal(first["decoder", 0], other["decoder", 0])
    assert not torch.equal(first["decoder", 0], first["encoder", 0])


def threshold_numbers(scores, floor, theta):
    """Returns the least number of best experts of each layer whose shares add up to theta."""
    numbers = {}
    for key, layer in scores.items():
        shares = (layer / layer.sum()).sort(descending=True).values.tolist()
        least = next(n for n in range(len(shares) + 1) if sum(shares[:n]) >= theta - 1e-12)
        numbers[key] = max(floor, least)
    return numbers


@pytest.mark.parametrize("floor", [1, 2])
def test_a_budget_is_shared_by_one_threshold(floor):
    torch.manual_seed(0)
    scores = {
        key: torch.rand(size).double() ** 3 for key, size in zip("abc", (5, 7, 3), strict=True)
    }
    for theta in torch.linspace(0.05, 1, 96).tolist():
        expected = threshold_numbers(scores, floor, theta)
        ours = share_budget(scores, sum(expected.values()), floor)
        assert ours == expected
    for budget in range(3 * floor, 16):
        assert sum(share_budget(scores, budget, floor).values()) == budget


# ---- refusals ----


@pytest.mark.parametrize(
    ("fields", "pruning", "message"),
    [
        ({}, {}, "keep is None and budget is None; expected one of them"),
        ({}, {"keep": 1}, "encoder 1 would keep 1 of 7 experts, and each token chooses 2"),
        ({}, {"keep": 7}, "keep is 7; expected less than the 7"),
        ({}, {"keep": (8, 3)}, r"keep is \(8, 3\); expected less than the 7"),
        ({}, {"keep": (3, 1)}, "decoder 1 would keep 1 of 7"),
        ({}, {"keep": (3, 3, 3)}, "keep is .*; expected one number, or two"),
        ({}, {"budget": 7}, "budget is 7; expected 8 to 13"),
        (DENSE, {"keep": 2}, "0 sparse layers"),
        ({"expert_quantization": {"bits": 8}}, {"keep": 3}, "8 bits, and only experts of floats"),
        (
            {"router": "hash", "num_selected_experts": 1, "router_options": {}},
            {"keep": 2},
            "'hash' has no weights for each of its 7 experts",
        ),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(fields, pruning, message):
    model = tiny_model(**fields)
    with pytest.raises(ConfigError, match=message):
        choose_experts(model, [tiny_batch()], Pruning(**pruning))


def test_other_tensors_keep_their_bytes_and_dtype(tmp_path):
    model = tiny_model().to(torch.bfloat16)
    pruned = prune(model, {key: [1, 6] for key in LAYERS}, tmp_path)
    assert pruned.dtype == torch.bfloat16
    before = model.state_dict()
    for name, value in pruned.state_dict().items():
        expected = before[name]
        if expected.shape != value.shape:
            expected = expected[[1, 6]]
        assert torch.equal(value, expected), name
    config = STMoEConfig.from_pretrained(tmp_path / "pruned")
    assert config == model.config.replaced(num_experts=2, dtype="bfloat16")
