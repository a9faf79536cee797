"""Pruning: a cut model computes what a masked one does, and scores follow from the blackboard."""

import math

import pytest
import torch

from moe import STMoEForConditionalGeneration
from moe.errors import ConfigError, DataError
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


def test_pruning_an_unused_expert_changes_nothing_bit_for_bit(tmp_path):
    """Every token is positive in coordinate 0, and there the last expert's row is negative."""
    model = exact_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 9
        for layer in sparse_layers(model).values():
            layer.router.gate[6] = -(2**14) * torch.eye(1, 29)
    choice = choose_experts(model, [tiny_batch()], Pruning("reap", keep=6))
    for key in LAYERS:
        assert choice.scores[key][6] == 0
        assert choice.kept[key].tolist() == list(range(6))
    pruned = prune(model, choice.kept, tmp_path)
    assert pruned.config.num_experts == 6
    assert torch.equal(logits(pruned), logits(model))
    inputs = {"input_ids": tiny_batch()["input_ids"], "max_new_tokens": 7}
    assert torch.equal(pruned.generate(**inputs), model.generate(**inputs))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"router_options": {"normalize_gates": False}},
        {"router": "switch", "router_options": {}, "num_selected_experts": 1},
        {"router": "bias_balanced", "router_options": {}},
        {"expert_bias": "multiplicative", "feed_forward_proj": "relu"},
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


def test_one_expert_is_the_dense_layer_times_a_gate_of_one(tmp_path):
    fields = {"router": "switch", "router_options": {}, "num_selected_experts": 1}
    model = tiny_model(**DROPLESS, **fields)
    pruned = prune(model, {key: [4] for key in LAYERS}, tmp_path)
    dense = tiny_model(**{**DENSE, "num_layers": 2})
    for (key, layer), sparse in zip(
        sparse_layers(pruned).items(), sparse_layers(model).values(), strict=True
    ):
        feed_forward = dense.get_encoder().stack.blocks[0].feed_forward
        with torch.no_grad():
            feed_forward.up_proj.weight.copy_(sparse.experts.gate_up_proj[4])
            feed_forward.down_proj.weight.copy_(sparse.experts.down_proj[4])
        x = torch.randn(2, 13, 29)
        y, output = layer(x)
        assert output.plan.combine_weight.unique().tolist() == [1], key
        torch.testing.assert_close(y, feed_forward(x))


def test_permuted_experts_are_pruned_to_the_same_model(tmp_path):
    model = tiny_model(**DROPLESS)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    permuted = tiny_model(**DROPLESS)
    for layer in sparse_layers(permuted).values():
        for parameter in layer.parameters():
            parameter.data = parameter.data[order]
    for name in SCORES:
        pruning = Pruning(name, keep=4)
        ours = choose_experts(model, [tiny_batch()], pruning).kept
        theirs = choose_experts(permuted, [tiny_batch()], pruning).kept
        for key in LAYERS:
            assert order[theirs[key]].sort().values.tolist() == ours[key].tolist(), name
    first = prune(model, ours, tmp_path / "a")
    second = prune(permuted, theirs, tmp_path / "b")
    torch.testing.assert_close(logits(first), logits(second), atol=1e-5, rtol=1e-5)


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
        ({}, {"keep": 1}, "encoder 1 would keep 1 of 7 experts, and each token chooses 2"),
        ({}, {"keep": 7}, "keep is 7; expected less than the 7"),
        ({}, {"budget": 7}, "budget is 7; expected 8 to 13"),
        ({}, {"budget": 9, "floor": 1}, "encoder 1 would keep 1 of 7"),
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


@pytest.mark.parametrize("settings", [{}, {"keep": 3, "budget": 9}])
def test_a_number_or_a_budget_is_needed(settings):
    with pytest.raises(ConfigError, match="expected one of them"):
        Pruning(**settings)


def test_a_router_that_needs_more_experts_is_refused(tmp_path):
    fields = {"router": "no_token_left_behind", "decoder_router": "switch", "router_options": {}}
    model = tiny_model(num_selected_experts=1, **fields)
    with pytest.raises(ConfigError, match=r"num_candidates.* is 4.*num_experts is 3"):
        prune(model, {key: [0, 1, 2] for key in LAYERS}, tmp_path)


def test_a_score_without_tokens_is_refused():
    with pytest.raises(DataError, match="0 tokens"):
        choose_experts(tiny_model(), [], Pruning(keep=3))


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
