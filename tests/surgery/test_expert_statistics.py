"""Statistics of experts against a loop over tokens, over several ranks, and in generation."""

import pytest
import torch
import torch.nn.functional as F

from moe.data.pipeline import Batch
from moe.distributed.mesh import MeshConfig, build_mesh
from moe.errors import DataError
from moe.models.parallelize import shard_model
from moe.sparse.editing import sparse_layers
from moe.surgery.expert_statistics import expert_statistics
from tests.distributed.ranks import run_ranks
from tests.models.tiny import tiny_batch, tiny_model

NARROW = {"eval_capacity_factor": 0.1, "min_expert_capacity": 1}


@torch.no_grad()
def by_token(model, batch: Batch):
    """Returns the fields of ExpertStatistics for each layer, from one token at a time.

    An expert is GEGLU. The second expert is used from a gate of 0.2 on, and no token is dropped.
    """
    inputs = {}

    def keep(layer, args, output):
        inputs[layer] = (args[0].double(), output[1].plan.token_mask.view(args[0].shape[:2]))

    hooks = [layer.register_forward_hook(keep) for layer in sparse_layers(model).values()]
    model(**batch)
    for hook in hooks:
        hook.remove()

    results = {}
    for key, layer in sparse_layers(model).items():
        x, mask = inputs[layer]
        first, down = (
            w.detach().double() for w in (layer.experts.first_proj, layer.experts.down_proj)
        )
        E = down.shape[0]
        sums = {
            "num_tokens": 0,
            **{name: torch.zeros(E) for name in ("load", "first_load")},
            **{
                name: torch.zeros(E, dtype=torch.float64)
                for name in ("gate_sum", "first_gate_sum", "gated_norm_sum")
            },
        }
        for token in x[mask]:
            logits = layer.router.gate.detach().double() @ token
            probs, experts = logits.softmax(0).topk(2)
            sums["num_tokens"] += 1
            for place, (gate, e) in enumerate(
                zip(probs / probs.sum(), experts.tolist(), strict=True)
            ):
                if place == 1 and gate <= 0.2:
                    continue
                hidden = first[e] @ token
                output = down[e] @ (F.gelu(hidden[:31], approximate="tanh") * hidden[31:])
                sums["load"][e] += 1
                sums["gate_sum"][e] += gate
                sums["gated_norm_sum"][e] += gate * output.norm()
                if place == 0:
                    sums["first_load"][e] += 1
                    sums["first_gate_sum"][e] += gate
        results[key] = sums
    return results


def assert_same(ours, theirs, rtol=1e-4):
    for key, expected in theirs.items():
        for name, value in expected.items():
            value = torch.as_tensor(value)
            actual = getattr(ours[key], name).to(value.dtype)
            torch.testing.assert_close(actual, value, rtol=rtol, atol=1e-4, msg=f"{key} {name}")


def test_statistics_are_those_of_a_loop_over_tokens():
    expected = by_token(tiny_model(router_options={}, eval_capacity_factor=None), tiny_batch())
    model = tiny_model(router_options={}, **NARROW).train()
    ours = expert_statistics(model, [tiny_batch()])
    assert model.training
    assert_same(ours, expected)
    assert set(ours) == {("encoder", 0), ("decoder", 0)}
    num_targets = (tiny_batch()["labels"] != -100).sum()
    assert ours["decoder", 0].num_tokens == num_targets


def test_token_dropout_is_no_part_of_the_gates():
    statistics = []
    for rate in (0.0, 0.5):
        model = tiny_model(router_options={"token_dropout": rate})
        statistics.append(expert_statistics(model, [tiny_batch()])["encoder", 0])
    assert_same({"encoder": statistics[0]}, {"encoder": statistics[1]._asdict()})


def test_batches_add_up_and_padding_adds_nothing():
    model = tiny_model()
    batches = [tiny_batch(seed=seed) for seed in (1, 2)]
    together = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    padded = {
        "input_ids": F.pad(together["input_ids"], (0, 5), value=17),
        "attention_mask": F.pad(together["attention_mask"], (0, 5)),
        "labels": F.pad(together["labels"], (0, 3), value=-100),
    }
    theirs = {key: value._asdict() for key, value in expert_statistics(model, [padded]).items()}
    assert_same(expert_statistics(model, batches), theirs)


@pytest.mark.parametrize("router", ["switch", "bias_balanced", "expert_choice"])
def test_gates_sum_to_those_of_the_plan(router):
    """Over experts, the sums are those of the router's own plan."""
    fields = {"router": router, "router_options": {}, "eval_capacity_factor": 1.0}
    if router != "bias_balanced":
        fields["num_selected_experts"] = 1
    model = tiny_model(**fields, decoder_router="switch" if router == "expert_choice" else None)
    ours = expert_statistics(model, [tiny_batch()])["encoder", 0]
    output = model(**tiny_batch(), output_router_logits=True).encoder_router_outputs[0]
    if router == "expert_choice":  # its capacity is how it chooses
        assert ours.load.sum() == output.plan.accepted.sum()
        assert ours.gate_sum.sum().item() == pytest.approx(output.plan.combine_weight.sum().item())
    else:
        assert ours.load.sum() == output.plan.requested.sum()
    assert ours.first_load.sum() <= ours.num_tokens
    assert (ours.first_gate_sum <= ours.gate_sum + 1e-9).all()


def test_batches_without_tokens_are_refused():
    empty = {**tiny_batch(), "labels": torch.full((4, 11), -100)}
    with pytest.raises(DataError, match="0 tokens for decoder 1"):
        expert_statistics(tiny_model(), [empty])
    with pytest.raises(DataError, match="0 tokens"):
        expert_statistics(tiny_model(), [])


def on_a_rank(rank, num_ranks):
    """Returns the statistics of a whole model, and of one whose experts are on both ranks."""
    batches = [tiny_batch(seed=seed) for seed in range(4)][rank::num_ranks]
    whole = expert_statistics(sharded_model(), batches)
    model = sharded_model()
    shard_model(model, build_mesh(MeshConfig(ep=num_ranks), "cpu"))
    return [as_dicts(whole), as_dicts(expert_statistics(model, batches))]


def sharded_model():
    return tiny_model(num_experts=8)


def as_dicts(statistics):
    return {key: value._asdict() for key, value in statistics.items()}


@pytest.mark.slow
def test_two_ranks_add_up_to_one_process(tmp_path):
    expected = expert_statistics(sharded_model(), [tiny_batch(seed=seed) for seed in range(4)])
    for answers in run_ranks(on_a_rank, 2, tmp_path):
        for theirs in answers:
            assert_same(expected, theirs)
