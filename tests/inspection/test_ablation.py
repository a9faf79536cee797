"""Ablations beside models that were changed by hand."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

from moe import ConfigError, DataError
from moe.inspection.ablation.ablate import ablate_experts, nearest_load
from moe.inspection.ablation.ablation_runs import run_ablated, run_unchanged
from moe.inspection.ablation.ablation_table import class_verdicts, expert_effects, shown_purposes
from moe.inspection.ablation.interventions import (
    INTERVENTIONS,
    ablate_expert,
    as_many_at_random,
    choices_of,
)
from moe.models.losses import target_losses
from moe.sparse.editing import edit_routing, sparse_layers
from moe.sparse.edits import DropExperts
from moe.sparse.plan import router_scores
from moe.tracing.recorder import record_routing, traced_batches
from tests.models.tiny import DENSE, tiny_batch, tiny_model

DROPLESS = {"eval_capacity_factor": None}
E = 7


def traced(*batches):
    return list(traced_batches(batches or [tiny_batch()]))


PACKED = {**tiny_batch(), "segment_ids": tiny_batch()["attention_mask"]}


def losses(model, batch):
    with torch.no_grad():
        return target_losses(model(**batch).logits, batch["labels"])


def changed_weights(model, change):
    """Calls `change(router, experts)` on each sparse layer."""
    with torch.no_grad():
        for layer in sparse_layers(model).values():
            change(layer.router, layer.experts)
    return model


# ---------------------------------------------------------------------------
# Nothing to ablate


@pytest.mark.parametrize(("dispatch", "capacity"), [("ragged", None), ("static", 2.0)])
def test_an_expert_that_no_token_chose_changes_nothing_bit_for_bit(dispatch, capacity):
    model = tiny_model(dispatch=dispatch, eval_capacity_factor=capacity)

    def never_choose(router, inputs, scores):
        return router_scores(scores.logits.index_fill(-1, torch.tensor([3]), -1e30))

    for module in sparse_layers(model).values():
        module.router.register_forward_hook(never_choose)
    batch = tiny_batch()
    unchanged = run_unchanged(model, batch)
    for key in sparse_layers(model):
        for kind, intervention in INTERVENTIONS.items():
            change = run_ablated(model, key, unchanged, ablate_expert(kind, model, key, 3))[0]
            assert torch.equal(change, torch.zeros_like(change))
            none = intervention(model, key, choices_of(3))
            assert not run_ablated(model, key, unchanged, none)[0].any()
            assert run_ablated(model, key, unchanged, ablate_expert(kind, model, key, 4))[0].any()

    layers = [("encoder", 0)]
    ablation = ablate_experts(model, traced(), {}, layers=layers, progress=False)
    assert ablation.layers[0].load[3] == 0
    assert expert_effects(ablation)[3].effect == (0, 0, 0)
    assert expert_effects(ablation)[3].over_random == (0, 0, 0)


def test_nothing_ablated_gives_the_same_losses_whatever_is_skipped():
    model = tiny_model(num_sparse_encoder_layers=2, num_sparse_decoder_layers=3)
    unchanged = run_unchanged(model, tiny_batch())
    torch.testing.assert_close(unchanged.losses, losses(model, tiny_batch()), rtol=0, atol=0)
    for key in sparse_layers(model):
        assert not run_ablated(model, key, unchanged, nullcontext())[0].any()


# ---------------------------------------------------------------------------
# Beside models changed by hand


@pytest.mark.parametrize(
    ("dispatch", "key"), [("static", ("encoder", 0)), ("ragged", ("decoder", 2))]
)
def test_drop_equals_output_weights_of_zero(dispatch, key):
    sparse = {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 3}
    model = tiny_model(dispatch=dispatch, **sparse)
    unchanged = run_unchanged(model, tiny_batch())
    drop = ablate_expert("drop", model, key, 4)
    change = run_ablated(model, key, unchanged, drop)[0]

    with torch.no_grad():
        sparse_layers(model)[key].experts.down_proj[4] = 0
    expected = losses(model, tiny_batch()) - unchanged.losses
    torch.testing.assert_close(change, expected, rtol=0, atol=1e-6)
    assert change.abs().max() > 1e-3


@pytest.mark.parametrize(
    ("dispatch", "policy", "decoder"), [("ragged", "threshold", 0), ("static", "all", 1)]
)
def test_reroute_equals_a_model_without_the_expert(dispatch, policy, decoder):
    options = {"second_expert_policy": "all", "eval_second_expert_policy": policy}
    fields = {
        "dispatch": dispatch,
        "router_options": options,
        "num_sparse_encoder_layers": 1 - decoder,
        "num_sparse_decoder_layers": decoder,
        **DROPLESS,
    }
    model = tiny_model(**fields)
    pruned = tiny_model(num_experts=E - 1, **fields)
    weights = {}
    for name, weight in model.state_dict().items():
        is_by_expert = ".router." in name or ".experts." in name
        weights[name] = torch.cat([weight[:2], weight[3:]]) if is_by_expert else weight
    pruned.load_state_dict(weights)

    (key,) = sparse_layers(model)
    batch = tiny_batch()
    unchanged = run_unchanged(model, batch)
    change = run_ablated(model, key, unchanged, ablate_expert("reroute", model, key, 2))[0]
    expected = losses(pruned, batch) - unchanged.losses
    torch.testing.assert_close(change, expected, rtol=0, atol=2e-6)
    assert change.abs().max() > 1e-3


# ---------------------------------------------------------------------------
# Tables of a whole model


def test_permuting_the_experts_permutes_the_table():
    order = torch.tensor([4, 2, 6, 0, 5, 1, 3])
    batches = traced()
    classes = {"odd": torch.arange(38) % 2 == 1}

    def permute(router, experts):
        for weight in (router.gate, experts.first_proj, experts.down_proj):
            weight.copy_(weight[order].clone())

    options = {"intervention": "reroute", "progress": False}
    before = ablate_experts(tiny_model(), batches, classes, **options)
    permuted = changed_weights(tiny_model(), permute)
    after = ablate_experts(permuted, batches, classes, **options)
    for ours, theirs in zip(after.layers, before.layers, strict=True):
        assert ours.load.tolist() == theirs.load[order].tolist()
        for name in ("change", "random_change", "chosen_change", "chosen_tokens"):
            expected = getattr(theirs, name)[order]
            torch.testing.assert_close(getattr(ours, name), expected, rtol=0, atol=1e-4)


def test_sums_are_those_of_each_token_by_class_document_and_choice():
    """Beside losses by hand, and the choices of a trace of the same batches."""
    model = tiny_model(**DROPLESS)
    batches = traced(tiny_batch(), tiny_batch(seed=1, batch=2))
    batches[1] = batches[1]._replace(documents=[0, 9])
    trace = record_routing(model, batches)
    classes = {"even": trace.decoder.targets % 2 == 0}
    ablation = ablate_experts(model, batches, classes, progress=False)
    assert (ablation.num_documents, ablation.num_targets) == (5, len(trace.decoder.targets))

    before = torch.cat([losses(model, batch) for batch, *_ in batches])
    assert ablation.loss == pytest.approx(float(before.mean()))
    document = torch.tensor([0, 1, 2, 3, 0, 4])[trace.decoder.example]
    for layer, layer_trace in zip(ablation.layers, trace.layers, strict=True):
        with edit_routing(model, {layer.key: DropExperts(4)}):
            after = torch.cat([losses(model, batch) for batch, *_ in batches])
        for number, name in enumerate(layer.sets):
            mask = torch.ones_like(document, dtype=torch.bool)
            if name == "even":
                mask = classes["even"]
            elif name == "sequences with even":
                mask = torch.isin(trace.decoder.example, trace.decoder.example[classes["even"]])
            for one in range(5):
                expected = ((after - before) * mask)[document == one].sum()
                torch.testing.assert_close(layer.change[4, number, one], expected)
                assert layer.num_tokens[number, one] == (mask & (document == one)).sum()

        works_on = (layer_trace.choices == 4).any(dim=1)
        if layer.key[0] == "encoder":
            sequences = trace.encoder.example[works_on]
            works_on = torch.isin(trace.decoder.example, sequences)
        assert layer.chosen_tokens[4].sum() == works_on.sum()
        accepted = layer_trace.expert[layer_trace.accepted]
        assert layer.load.tolist() == accepted.bincount(minlength=E).tolist()
        assert torch.equal(layer.peer, nearest_load(layer.load))
        expected = ((after - before) * works_on).sum()
        torch.testing.assert_close(layer.chosen_change[4].sum(), expected)
    assert ablation.layers[0].sets == ("all tokens", "even", "sequences with even")
    assert ablation.layers[1].sets == ("all tokens", "even")


def test_an_answer_is_lost_if_greedy_decoding_gives_it_with_the_expert_only():
    model = tiny_model(**DROPLESS)
    batch = tiny_batch(batch=11, targets=3)
    del batch["labels"]

    def decode():
        tokens = model.generate(**batch, max_new_tokens=3, do_sample=False, eos_token_id=[])
        return tokens[:, 1:]

    # One answer is wrong from the start.
    answers = decode()
    answers[4, 2] = (answers[4, 2] + 1) % 32
    batches = traced({**batch, "labels": answers})
    ablation = ablate_experts(model, batches, {}, progress=False)
    assert ablation.recalled.tolist() == [number != 4 for number in range(11)]
    for layer in ablation.layers:
        for expert in range(len(layer.lost)):
            with edit_routing(model, {layer.key: DropExperts(expert)}):
                changed = (decode() != answers).any(dim=1)
            assert torch.equal(layer.lost[expert], changed & ablation.recalled)
    assert any(layer.lost.any() for layer in ablation.layers)


def test_input_classes_name_the_sequences_that_hold_a_token():
    batches = traced(tiny_batch())
    model = tiny_model()
    trace = record_routing(model, batches)
    is_second = trace.encoder.example == 1
    rare = {"rare": is_second & (trace.encoder.position == 0)}
    encoder, decoder = ablate_experts(model, batches, {}, input_classes=rare, progress=False).layers
    assert encoder.sets == ("all tokens", "sequences with rare")
    assert encoder.num_tokens[1].tolist() == [0, 10, 0, 0]
    assert decoder.sets == ("all tokens",)


def test_a_planted_expert_is_found():
    """In the decoder expert 2 alone knows what follows the tokens 2 to 40; others say nothing."""
    model = tiny_model(
        expert_bias="additive",
        num_sparse_encoder_layers=0,
        sparse_dense_stacking=False,
        num_decoder_layers=1,
        **DROPLESS,
    )
    (layer,) = sparse_layers(model).values()
    head = F.normalize(model.lm_head.weight[3].detach(), dim=0)
    with torch.no_grad():
        # Tokens 2 to 40 are marked by a dimension that nothing else has, and expert 2 reads it.
        model.get_input_embeddings().weight[:, 0] = 0
        model.get_input_embeddings().weight[2:41, 0] = 30
        layer.router.gate[:, 0] = -5
        layer.router.gate[2, 0] = 5
        for name, weight in model.model.decoder.named_parameters():
            if "attention.o_proj" in name or "attention.out_proj" in name:
                weight.zero_()

        # Its output is token 3; that of the others is next to nothing.
        layer.experts.first_proj.zero_()
        layer.experts.bias.fill_(1.0)
        layer.experts.down_proj.mul_(1e-3)
        layer.experts.down_proj[2] = head[:, None] * 10

    batches = []
    for seed in range(2):
        batch = tiny_batch(seed=seed, batch=11, length=17, targets=23)
        inputs = model.prepare_decoder_input_ids_from_labels(batch["labels"])
        follows = (inputs >= 2) & (inputs < 41) & (batch["labels"] != -100)
        batches.append({**batch, "labels": batch["labels"].masked_fill(follows, 3)})
    targets = record_routing(model, traced(*batches)).decoder.targets
    classes = {"threes": targets == 3, "high": targets > 90, "even": targets % 2 == 0}

    ablation = ablate_experts(model, traced(*batches), classes, progress=False)
    verdicts = class_verdicts(ablation)
    yes = [(verdict.expert, verdict.token_class) for verdict in verdicts if verdict.answer == "yes"]
    assert yes == [(2, "threes")]
    assert next(iter(shown_purposes(ablation).values())) == "threes"


# ---------------------------------------------------------------------------
# Random choices


def test_random_choices_are_as_many_in_every_sequence():
    model = tiny_model(group_size=26, eval_capacity_factor=1.0)
    batch = tiny_batch()
    for key, plan in run_unchanged(model, batch).plans.items():
        for expert in range(E):
            drawn = as_many_at_random(expert, num_sequences=4, seed=3)(plan)
            assert not (drawn & ~plan.accepted).any()
            by_sequence = drawn.reshape(4, -1).sum(dim=1)
            own = choices_of(expert)(plan).reshape(4, -1).sum(dim=1)
            assert by_sequence.tolist() == own.tolist(), key
        again = as_many_at_random(expert, num_sequences=4, seed=3)(plan)
        other = as_many_at_random(expert, num_sequences=4, seed=4)(plan)
        assert torch.equal(drawn, again) and not torch.equal(drawn, other)


def test_two_barred_choices_of_a_token_leave_it_finite_weights():
    """Of 3 experts a token that may have one alone gets that one, with all the weight."""
    model = tiny_model(num_experts=3, **DROPLESS)
    key = ("encoder", 0)
    batch = tiny_batch()

    def both(plan):
        return plan.accepted

    unchanged = run_unchanged(model, batch)
    with INTERVENTIONS["reroute"](model, key, both):
        rerouted = run_unchanged(model, batch).plans[key]
    assert rerouted.combine_weight.isfinite().all()
    assert (rerouted.accepted.sum(dim=-1) == rerouted.token_mask).all()
    is_barred = rerouted.expert_index[..., 0, None] == unchanged.plans[key].expert_index
    assert not is_barred.any(dim=-1)[rerouted.token_mask].any()
    torch.testing.assert_close(rerouted.combine_weight.sum(dim=-1), rerouted.token_mask.float())


def test_the_peer_has_the_nearest_load():
    assert nearest_load(torch.tensor([5, 100, 6, 80, 5])).tolist() == [4, 3, 0, 1, 0]


# ---------------------------------------------------------------------------
# The model afterwards, and wrong arguments


def test_a_model_in_training_is_ablated_in_evaluation_mode(capsys):
    model = tiny_model(dropout_rate=0.5).train()
    first, second = (ablate_experts(model, traced(), {}, layers=[("decoder", 0)]) for _ in range(2))
    assert model.training
    assert first.loss == second.loss
    assert "7/7" in capsys.readouterr().err  # the progress bar counts experts


def test_blocks_are_restored_after_an_error_also_those_that_somebody_wrapped():
    model = tiny_model(num_sparse_decoder_layers=3)
    block = model.model.decoder.blocks[0]
    block.forward = wrapped = block.forward
    unchanged = run_unchanged(model, tiny_batch())

    def refuse(scores, plan):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        run_ablated(model, ("decoder", 2), unchanged, edit_routing(model, {("decoder", 2): refuse}))
    assert torch.equal(losses(model, tiny_batch()), unchanged.losses)
    assert vars(block)["forward"] is wrapped


@pytest.mark.parametrize(
    ("arguments", "model", "error", "text"),
    [
        ({"intervention": "dorp"}, {}, ConfigError, "'dorp'; expected one of drop, reroute"),
        ({"layers": [("encoder", 3)]}, {}, ConfigError, r"no sparse layer \('encoder', 3\)"),
        ({}, DENSE, ConfigError, r"layers to ablate is \[\]; expected at least one"),
        ({"batches": []}, {}, DataError, "0 batches have no target token"),
        ({"batches": traced(PACKED)}, {}, DataError, "needs labels and no segment_ids"),
    ],
)
def test_wrong_arguments_are_refused(arguments, model, error, text):
    settings = {"batches": traced(), "classes": {}, "progress": False, **arguments}
    with pytest.raises(error, match=text):
        ablate_experts(tiny_model(**model), **settings)
